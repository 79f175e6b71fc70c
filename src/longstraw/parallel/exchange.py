"""The few collectives that the other files of this room use, on one axis, with blocks of uneven sizes.

Apart from what is computed between them, so that bytes are counted in one place and backends differ in one place. No
autograd. On an axis of degree 1 every one of them is free. All ranks of the axis make the same calls in the same order,
ranks without tokens included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw.errors import JointError
from longstraw.ops.kernels import wide_dtype
from longstraw.parallel.topology import Axis


@dataclass(frozen=True)
class TrafficReport:
    """Bytes this rank sent, by kind."""

    bytes_by_kind: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())


class Traffic:
    """Counts the bytes this rank sends: what is gathered or broadcast counts once for each other rank.

    A sum over d ranks counts 2 (d - 1) / d times its size, what a ring sends.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def add(self, kind: str, num_bytes: int) -> None:
        self._bytes[kind] = self._bytes.get(kind, 0) + num_bytes

    def report(self) -> TrafficReport:
        """What was sent so far."""
        return TrafficReport(MappingProxyType(dict(self._bytes)))


@dataclass(frozen=True, eq=False)
class Arrival:
    """A tensor on its way: `wait` returns it when it may be read."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True, eq=False)
class Exchange:
    """Collectives on one axis, counted by kind into one record."""

    axis: Axis
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def degree(self) -> int:
        return self.axis.degree

    @property
    def rank(self) -> int:
        return self.axis.rank

    def all_gather_tokens(self, block: Tensor, sizes: Sequence[int], *, dim: int, kind: str) -> list[Tensor]:
        """Every rank's block, in rank order. Blocks differ in their size along `dim` only; `sizes` are all ranks'.

        One gather of blocks padded to the largest: an axis' shares differ by a token at most.
        """
        assert block.shape[dim] == sizes[self.rank], f"a block of {block.shape[dim]} tokens, expected {sizes}"
        if self.degree == 1:
            return [block]
        widest = max(sizes)
        front = block.movedim(dim, 0).contiguous()
        if len(front) < widest:
            front = torch.cat([front, front.new_zeros(widest - len(front), *front.shape[1:])])
        gathered = front.new_empty(self.degree, *front.shape)
        self._count(kind, front.numel() * (self.degree - 1), front)
        if front.numel() > 0:
            dist.all_gather(list(gathered), front, group=self.axis.group)
        return [part[:size].movedim(0, dim) for part, size in zip(gathered, sizes, strict=True)]

    def all_to_all(self, blocks: Sequence[Tensor], shapes: Sequence[Sequence[int]], *, kind: str) -> list[Tensor]:
        """Block s goes to rank s; returns what each rank sent here, of the given shapes. Any of them may be empty."""
        if self.degree == 1:
            return [blocks[0]]
        sent = torch.cat([block.reshape(-1) for block in blocks])
        received_sizes = [prod(shape) for shape in shapes]
        received = sent.new_empty(sum(received_sizes))
        sent_sizes = [block.numel() for block in blocks]
        self._count(kind, sent.numel() - sent_sizes[self.rank], sent)
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.axis.group)
        return [part.view(*shape) for part, shape in zip(received.split(received_sizes), shapes, strict=True)]

    def send_back(self, blocks: Sequence[Tensor], *, kind: str) -> list[Tensor]:
        """Block s, computed here for rank s, goes to rank s; returns what each rank computed for this one."""
        return self.all_to_all(blocks, [blocks[self.rank].shape] * self.degree, kind=kind)

    def all_reduce_sum(self, tensor: Tensor, *, kind: str) -> Tensor:
        """The sum over ranks as a new tensor: integers as they are, floating point in float32 at least."""
        total = tensor.to(wide_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype, copy=True)
        if self.degree > 1 and total.numel() > 0:
            self._count(kind, 2 * (self.degree - 1) * total.numel() // self.degree, total)
            dist.all_reduce(total, group=self.axis.group)
        return total

    def start_broadcast(self, tensor: Tensor, owner: int, *, kind: str) -> Arrival:
        """The owner's tensor on every rank: elsewhere the given one is filled. Compute goes on until `wait`.

        The tensor is contiguous, and the owner leaves it as it is until then.
        """
        if self.degree == 1 or tensor.numel() == 0:
            return Arrival(tensor, None)
        if self.rank == owner:
            self._count(kind, tensor.numel() * (self.degree - 1), tensor)
        return Arrival(tensor, dist.broadcast(tensor, group=self.axis.group, group_src=owner, async_op=True))

    def reduce_to_owner(self, tensor: Tensor, owner: int, *, kind: str) -> Tensor | None:
        """The sum over ranks, on its owner; None elsewhere. Overwrites the given tensor, which must be wide."""
        assert tensor.dtype == wide_dtype(tensor.dtype), "cotangents are summed in float32"
        if self.degree > 1 and tensor.numel() > 0:
            if self.rank != owner:
                self._count(kind, tensor.numel(), tensor)
            dist.reduce(tensor, group=self.axis.group, group_dst=owner)
        return tensor if self.rank == owner else None

    def raise_together(self, message: str | None) -> None:
        """Raise `JointError` with the first rank's message on all ranks if any rank has one; else return.

        For errors that one rank alone can see: it reports here instead of leaving the others in a collective.
        """
        text = torch.tensor(list((message or "").encode()), dtype=torch.uint8, device=self.axis.device)
        length = torch.tensor([len(text)], device=self.axis.device)
        lengths = [int(n) for n in self.all_gather_tokens(length, [1] * self.degree, dim=0, kind="agreement")]
        if not any(lengths):
            return
        texts = self.all_gather_tokens(text, lengths, dim=0, kind="agreement")
        raise JointError(next(bytes(t.tolist()).decode() for t in texts if len(t) > 0))

    def _count(self, kind: str, num_numbers: int, tensor: Tensor) -> None:
        self.traffic.add(kind, num_numbers * tensor.element_size())
