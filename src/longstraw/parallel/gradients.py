"""Gradients and parameters over ranks: one sum per update, one norm, and a proof that all copies stayed equal.

Parameters fall into classes by how they are divided: most are copied to every rank, routed experts only to the ranks
that share an expert's place on the expert axis. Each rank computed a part of a copy's gradient, from its tokens and its
groups, so the sum over copies is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from longstraw.ops.kernels import wide_dtype
from longstraw.parallel.exchange import Exchange, Traffic
from longstraw.parallel.topology import Axis

# Numbers whose bits are summed at once: bounds the digest's working memory.
DIGEST_BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class ParameterClass:
    """Parameters that are divided alike. Ranks of `copies` and of `parts` hold the same names, alike ordered."""

    parameters: Mapping[str, Tensor]
    copies: Axis = field(default_factory=Axis)  # the ranks that hold these parameters as well
    parts: Axis = field(default_factory=Axis)  # the ranks that hold other parameters in their place; degree 1: none do


def sum_gradients(
    kind: ParameterClass, gradients: Mapping[str, Tensor | None], traffic: Traffic
) -> dict[str, Tensor | None]:
    """The sum of every parameter's gradient over its copies, as new tensors in float32 at least.

    A rank without a gradient (None) counts as zeros; a parameter that no rank of `copies` or `parts` has one for gets
    None everywhere: with its parts on one rank it would be one parameter. After this call all copies hold the same
    bits. Collectives: sums of one number per parameter ("agreement"), then one flat sum per dtype ("gradients"), whose
    buffer the results are views of.
    """
    exchange = Exchange(kind.copies, traffic)
    names = list(kind.parameters)
    has = torch.tensor([gradients[name] is not None for name in names], dtype=torch.int32, device=kind.copies.device)
    num_copies_with = exchange.all_reduce_sum(has, kind="agreement")
    num_with = Exchange(kind.parts, traffic).all_reduce_sum(num_copies_with, kind="agreement")
    shared = [name for name, count in zip(names, num_with.tolist(), strict=True) if count > 0]
    sums: dict[str, Tensor | None] = dict.fromkeys(names)

    def dtype_of(name: str) -> torch.dtype:
        return wide_dtype(kind.parameters[name].dtype)

    for dtype, group in groupby(sorted(shared, key=lambda name: str(dtype_of(name))), key=dtype_of):
        members = list(group)
        flat = exchange.all_reduce_sum(_flatten(kind, gradients, members, dtype), kind="gradients")
        parts = flat.split([kind.parameters[name].numel() for name in members])
        for name, part in zip(members, parts, strict=True):
            sums[name] = part.view(kind.parameters[name].shape)
    return sums


def global_norm(classes: Sequence[tuple[ParameterClass, Mapping[str, Tensor | None]]], world: Exchange) -> float:
    """L2 norm over all parameters of the job, each counted once, from their final gradients; the same on all ranks.

    Raises `JointError` on all ranks, naming a parameter, if any gradient is not finite. Collectives: the agreement
    on that, and a sum for each class that has parts.
    """
    squares, broken = [], []
    for _, gradients in classes:
        present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        norms = torch.stack([_norm(g) for g in present.values()]).tolist() if present else []
        broken += [name for name, norm in zip(present, norms, strict=True) if not math.isfinite(norm)]
        squares.append(math.fsum(norm**2 for norm in norms))
    message = f"the gradient of {broken[0]} is not finite; the step was not taken." if broken else None
    world.raise_together(message)
    total = 0.0
    for (kind, _), square in zip(classes, squares, strict=True):
        mine = torch.tensor(square, dtype=torch.float64, device=kind.parts.device)
        total += float(Exchange(kind.parts, world.traffic).all_reduce_sum(mine, kind="agreement"))
    return math.sqrt(total)


def check_same_parameters(classes: Sequence[ParameterClass], world: Exchange) -> None:
    """Compare a digest of every parameter's bits over its copies; 16 bytes a parameter travel.

    Raises `JointError` with one message on all ranks, naming the first parameter that differs.
    """
    message = None
    for kind in classes:
        names, device = list(kind.parameters), kind.copies.device
        mine = torch.stack([digest(kind.parameters[name]) for name in names]).to(device) if names else None
        if mine is None:
            continue
        everyone = Exchange(kind.copies, world.traffic).all_gather_tokens(
            mine, [len(names)] * kind.copies.degree, dim=0, kind="digest"
        )
        for rank, other in enumerate(everyone):
            differing = (other != everyone[0]).any(1).nonzero()[:, 0].tolist()
            if differing and message is None:
                message = (
                    f"{len(differing)} of {len(names)} parameters differ between the copies 0 and {rank} after the "
                    f"step, the first is {names[differing[0]]}; resume from the last checkpoint."
                )
    world.raise_together(message)


@torch.no_grad()
def digest(parameter: Tensor) -> Tensor:
    """Two int64 that depend on every bit of a parameter and, the second, on where it stands."""
    bits = parameter.detach().contiguous().view(-1).view(_INTEGERS[parameter.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=parameter.device)
    for begin in range(0, len(bits), DIGEST_BLOCK):
        block = bits[begin : begin + DIGEST_BLOCK].long()
        place = torch.arange(begin, begin + len(block), device=block.device)
        sums[0] += block.sum()
        sums[1] += (block * (place * 2 + 1)).sum()  # wraps around, the same on all ranks
    return sums


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flatten(
    kind: ParameterClass, gradients: Mapping[str, Tensor | None], names: Sequence[str], dtype: torch.dtype
) -> Tensor:
    def parts() -> Iterator[Tensor]:
        for name in names:
            gradient = gradients[name]
            if gradient is None:
                yield torch.zeros(kind.parameters[name].numel(), dtype=dtype, device=kind.parameters[name].device)
            else:
                yield gradient.detach().reshape(-1).to(dtype)

    return torch.cat(list(parts()))


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
