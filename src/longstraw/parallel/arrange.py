"""Between a chunk in position order and the shares of its ranks. No communication but what `gather_chunk` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit


def of_rank(chunk: Tensor, split: ChunkSplit, rank: int, *, dim: int) -> Tensor:
    """A rank's tokens of a whole chunk that lies along `dim`, in position order. A view if they are one piece."""
    parts = [chunk.narrow(dim, piece.begin, len(piece)) for piece in split.pieces[rank]]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else chunk.narrow(dim, 0, 0)


def by_rank(chunk: Tensor, split: ChunkSplit, *, dim: int) -> list[Tensor]:
    """Every rank's tokens of a whole chunk."""
    return [of_rank(chunk, split, rank, dim=dim) for rank in range(split.degree)]


def in_position_order(blocks: Sequence[Tensor], split: ChunkSplit, *, dim: int) -> Tensor:
    """The whole chunk from every rank's tokens: the inverse of `by_rank`."""
    if split.degree == 1:
        return blocks[0]
    parts: list[tuple[int, Tensor]] = []
    for block, pieces in zip(blocks, split.pieces, strict=True):
        at = 0
        for piece in pieces:
            parts.append((piece.begin, block.narrow(dim, at, len(piece))))
            at += len(piece)
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim)


def gather_chunk(mine: Tensor, split: ChunkSplit, exchange: Exchange, *, dim: int, kind: str) -> Tensor:
    """The whole chunk in position order from this rank's tokens. One all-gather; no gradient."""
    return in_position_order(exchange.all_gather_tokens(mine, split.sizes, dim=dim, kind=kind), split, dim=dim)
