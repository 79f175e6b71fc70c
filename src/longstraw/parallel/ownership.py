"""Which rank of the context axis runs, and therefore keeps, which tokens: arithmetic on ints, no communication.

Every chunk is split over the ranks, so each owns a share of every stretch of the sequence. Within a chunk a rank has at
most two contiguous pieces. `block_cyclic` gives each rank one block. `zigzag` cuts the chunk into twice as many blocks
and gives rank r the blocks r and 2 * degree - 1 - r: an early and a late one, so that all ranks have about the same
number of pairs under a causal mask.

Shape suffixes: N tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Order = Literal["block_cyclic", "zigzag"]


@dataclass(frozen=True, order=True)
class Piece:
    """Consecutive tokens begin to end of a chunk or a node, counted from its first token; never empty."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class ChunkSplit:
    """How the tokens of one chunk are divided over the ranks of a context axis. Sizes differ by at most one token.

    A chunk with fewer tokens than ranks leaves the last ranks without any.
    """

    num_tokens: int
    degree: int
    order: Order = "zigzag"

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Each rank's pieces, ascending; adjacent ones are one piece. Together they cover the chunk exactly."""
        if self.order == "block_cyclic":
            blocks = _blocks(self.num_tokens, self.degree)
            return tuple(_joined([block]) for block in blocks)
        blocks = _blocks(self.num_tokens, 2 * self.degree)
        return tuple(_joined([blocks[rank], blocks[-1 - rank]]) for rank in range(self.degree))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(map(len, pieces)) for pieces in self.pieces)

    def pieces_before(self, end: int, rank: int) -> tuple[Piece, ...]:
        """A rank's pieces of the chunk's first `end` tokens."""
        return tuple(Piece(p.begin, min(p.end, end)) for p in self.pieces[rank] if p.begin < end)

    def pieces_from(self, begin: int, rank: int) -> tuple[Piece, ...]:
        """A rank's pieces of the chunk's other tokens."""
        return tuple(Piece(max(p.begin, begin), p.end) for p in self.pieces[rank] if p.end > begin)

    def owner(self, token: int) -> int:
        """The rank that owns a token of the chunk. Raises `IndexError` outside the chunk."""
        for rank, pieces in enumerate(self.pieces):
            if any(piece.begin <= token < piece.end for piece in pieces):
                return rank
        raise IndexError(f"token {token} of a chunk of {self.num_tokens}")

    def local_index(self, token: int) -> int:
        """Which of its owner's tokens of the chunk it is."""
        before = self.pieces[self.owner(token)]
        return sum(min(len(piece), max(0, token - piece.begin)) for piece in before)


@dataclass(frozen=True)
class NodeSplit:
    """How the tokens of a node (the prompt or a span) are divided: chunk by chunk, as they are run."""

    num_tokens: int
    chunk_tokens: int
    degree: int
    order: Order = "zigzag"

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    def chunk(self, index: int) -> ChunkSplit:
        """The split of the node's chunk."""
        begin = index * self.chunk_tokens
        return ChunkSplit(min(self.chunk_tokens, self.num_tokens - begin), self.degree, self.order)

    def first_chunks(self, num_chunks: int) -> NodeSplit:
        """The node up to a chunk: what a rank owns of it is the beginning of what it owns of the whole."""
        return replace(self, num_tokens=min(num_chunks * self.chunk_tokens, self.num_tokens))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """A rank's tokens, counted from the node's first, ascending."""
        for index in range(self.num_chunks):
            begin = index * self.chunk_tokens
            for piece in self.chunk(index).pieces[rank]:
                yield Piece(begin + piece.begin, begin + piece.end)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank: the lengths of their extents."""
        num_full, rest = divmod(self.num_tokens, self.chunk_tokens)
        full, last = (ChunkSplit(n, self.degree, self.order).sizes for n in (self.chunk_tokens, rest))
        return tuple(num_full * of_full + of_last for of_full, of_last in zip(full, last, strict=True))

    def owner(self, token: int) -> int:
        """The rank that owns a token of the node."""
        index, in_chunk = divmod(token, self.chunk_tokens)
        return self.chunk(index).owner(in_chunk)

    def positions(self, rank: int, *, start: int = 0) -> Tensor:
        """Positions in the sequence of a rank's tokens of a node that begins at `start`.

        int64 `[N]` on the CPU, ascending: the order of the rank's extent.
        """
        ranges = [torch.arange(piece.begin, piece.end) for piece in self.pieces(rank)]
        return start + torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def most_in_window(self, rank: int, width: int) -> int:
        """The most tokens of a rank among the last `width` before the end of any chunk: what a window needs kept."""
        position_N = self.positions(rank)
        end_C = torch.arange(1, self.num_chunks + 1) * self.chunk_tokens
        end_C = end_C.clamp(max=self.num_tokens)
        in_window_C = torch.searchsorted(position_N, end_C) - torch.searchsorted(position_N, end_C - width)
        return int(in_window_C.max()) if len(in_window_C) > 0 else 0

    def locate(self, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """For tokens of the node (int64 on any device): who owns each, and which of the owner's tokens it is."""
        num_blocks = self.degree if self.order == "block_cyclic" else 2 * self.degree
        chunk_N = token_N // self.chunk_tokens
        token_N = token_N - chunk_N * self.chunk_tokens
        rest_tokens = self.num_tokens % self.chunk_tokens
        is_full_N = chunk_N < self.num_tokens // self.chunk_tokens
        num_tokens_N = torch.where(is_full_N, self.chunk_tokens, rest_tokens)
        # The first `num_larger` blocks have `size + 1` tokens, the others `size`.
        size_N, num_larger_N = num_tokens_N // num_blocks, num_tokens_N % num_blocks
        in_smaller_N = token_N - num_larger_N * (size_N + 1)
        block_N = torch.where(
            in_smaller_N < 0, token_N // (size_N + 1), num_larger_N + in_smaller_N // size_N.clamp(min=1)
        )
        in_block_N = token_N - block_N * size_N - torch.minimum(block_N, num_larger_N)
        is_late_N = block_N >= self.degree  # a rank's second block
        owner_N = torch.where(is_late_N, num_blocks - 1 - block_N, block_N)
        before_N = torch.where(is_late_N, size_N + (owner_N < num_larger_N), 0)
        of_full = torch.tensor(ChunkSplit(self.chunk_tokens, self.degree, self.order).sizes, device=token_N.device)
        return owner_N, chunk_N * of_full[owner_N] + before_N + in_block_N


def _blocks(num_tokens: int, num_blocks: int) -> list[tuple[int, int]]:
    """Consecutive blocks whose sizes differ by at most one, larger ones first."""
    size, rest = divmod(num_tokens, num_blocks)
    ends = [(index + 1) * size + min(index + 1, rest) for index in range(num_blocks)]
    return list(zip([0, *ends], ends, strict=False))


def _joined(blocks: list[tuple[int, int]]) -> tuple[Piece, ...]:
    """Ascending blocks without the empty ones, adjacent ones joined."""
    pieces: list[Piece] = []
    for begin, end in blocks:
        if begin == end:
            continue
        if pieces and pieces[-1].end == begin:
            pieces[-1] = Piece(pieces[-1].begin, end)
        else:
            pieces.append(Piece(begin, end))
    return tuple(pieces)
