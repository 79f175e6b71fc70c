"""The axes of a job: how many ranks divide groups of responses (data), tokens (context) and experts (expert), and who.

`data * context` is the number of processes; consecutive ranks are one context axis. The expert axis divides experts'
parameters over ranks of a context axis: consecutive ranks too, a divisor of its degree. They run the same chunks in the
same order, which an all-to-all between them needs; ranks of a data axis, with prompts of their own, do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from longstraw.errors import InputError, UnsupportedError
from longstraw.parallel.ownership import Order

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis as this process sees it."""

    degree: int = 1
    rank: int = 0  # of this process on the axis
    group: dist.ProcessGroup | None = None  # None: of degree 1, nothing to communicate
    device: torch.device = CPU  # where tensors are when they travel


@dataclass(frozen=True, eq=False)
class Topology:
    """The axes of a job. Made once, passed as an argument; `Topology.single()` is one process without groups."""

    data: Axis = field(default_factory=Axis)
    context: Axis = field(default_factory=Axis)
    expert: Axis = field(default_factory=Axis)
    expert_copies: Axis = field(default_factory=Axis)  # the ranks with the same experts as this one
    world: Axis = field(default_factory=Axis)
    token_order: Order = "zigzag"
    compares_copies: bool = True

    @classmethod
    def single(cls) -> Topology:
        """One process."""
        return cls()

    @classmethod
    def create(
        cls,
        *,
        context: int = 1,
        data: int = 1,
        expert: int = 1,
        token_order: Order = "zigzag",
        compares_copies: bool = True,
        timeout: timedelta | None = None,
    ) -> Topology:
        """The axes of these degrees in the initialised process group. Collective: all ranks call it, alike.

        `token_order`: how a chunk's tokens are dealt to the ranks of the context axis, see `ownership`.
        `compares_copies`: after each step compare a digest of the parameters over ranks. `timeout`: how long a
        collective on one of the axes waits for a rank; None is torch.distributed's default.

        Without a process group only degrees of 1 are possible. Raises `InputError`, the same on all ranks and before
        anything is sent, if a degree is below 1 or the degrees do not fit the number of processes.
        """
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        check_degrees(num_processes, context=context, data=data, expert=expert)
        if num_processes == 1:
            return cls.single()
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else CPU
        data_axis, context_axis = _grid(device, data, context, timeout)
        if expert == 1:
            copies, expert_axis = Axis(num_processes, dist.get_rank(), dist.group.WORLD, device), Axis(device=device)
        elif expert == context:
            copies, expert_axis = data_axis, context_axis
        else:
            copies, expert_axis = _grid(device, num_processes // expert, expert, timeout)
        world = Axis(num_processes, dist.get_rank(), dist.group.WORLD, device)
        return cls(data_axis, context_axis, expert_axis, copies, world, token_order, compares_copies)

    def check_heads(self, num_key_heads: int, num_value_heads: int) -> None:
        """Raise `UnsupportedError` unless the context axis divides a DeltaNet layer's heads; the same on all ranks."""
        degree = self.context.degree
        if num_key_heads % degree or num_value_heads % degree:
            raise UnsupportedError(
                f"context={degree} does not divide the DeltaNet layers' {num_key_heads} key heads and "
                f"{num_value_heads} value heads, which the ranks share out; set context to a divisor of both."
            )


def check_degrees(num_processes: int, *, context: int, data: int, expert: int) -> None:
    """Raise `InputError` if the degrees are not positive or do not fit so many processes."""
    for name, degree in (("context", context), ("data", data), ("expert", expert)):
        if degree < 1:
            raise InputError(f"{name} must be at least 1, got {degree}.")
    if data * context != num_processes:
        raise InputError(
            f"data={data} times context={context} needs {data * context} processes, but there are {num_processes}; "
            f"start {data * context} (torchrun --nproc-per-node) or change the degrees."
        )
    if context % expert:
        raise InputError(
            f"expert={expert} does not divide context={context}, whose ranks share out the experts; set expert to a "
            "divisor of that number."
        )


def _grid(device: torch.device, outer: int, inner: int, timeout: timedelta | None) -> tuple[Axis, Axis]:
    """The two axes of processes in rows of `inner` consecutive ones: down a column, and along a row."""
    rows = [[row * inner + column for column in range(inner)] for row in range(outer)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return _axis(device, columns, timeout), _axis(device, rows, timeout)


def _axis(device: torch.device, lines: list[list[int]], timeout: timedelta | None) -> Axis:
    """The axis along which processes that stand in one line share work. Collective where the lines are longer than one.

    Not by `init_device_mesh`, whose groups take no timeout.
    """
    degree = len(lines[0])
    if degree == 1:
        return Axis(device=device)
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    rank = dist.get_rank()
    return Axis(degree, next(line.index(rank) for line in lines if rank in line), group, device)
