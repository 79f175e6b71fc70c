"""From tokens to heads and back: how a layer that recurs over tokens is divided over the context axis.

A rank that has its tokens of all heads gets all tokens of its heads, in position order. Rank r's heads are the r-th of
`degree` equal ranges, so key heads and the value heads they serve stay together.

Shape suffixes: B batch, T tokens (of this rank, or of the chunk in position order), H heads, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw.parallel.arrange import by_rank, in_position_order
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit


def tokens_to_heads(x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
    """`[B, tokens of this rank, all heads, D]` to `[B, tokens of the chunk, heads / degree, D]` in position order.

    The heads must be a multiple of the degree. Differentiable: the gradient goes the way back. One all-to-all (kind
    "heads") in forward and one in backward, on every rank, also one without tokens.
    """
    return _TokensToHeads.apply(x_BTHD, exchange, split)


def heads_to_tokens(x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
    """The inverse of `tokens_to_heads`; same gradient behaviour and collectives."""
    return _HeadsToTokens.apply(x_BTHD, exchange, split)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
        ctx.setting = exchange, split
        return _to_heads(x_BTHD, exchange, split)

    @staticmethod
    def backward(ctx: Any, d_out_BTHD: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(d_out_BTHD, *ctx.setting), None, None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
        ctx.setting = exchange, split
        return _to_tokens(x_BTHD, exchange, split)

    @staticmethod
    def backward(ctx: Any, d_out_BTHD: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(d_out_BTHD, *ctx.setting), None, None


def _to_heads(x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
    batch, num_tokens, num_heads, width = x_BTHD.shape
    assert num_heads % split.degree == 0, f"{num_heads} heads do not divide over {split.degree} ranks"
    assert num_tokens == split.sizes[exchange.rank], f"{num_tokens} tokens on rank {exchange.rank} of {split.sizes}"
    blocks = x_BTHD.chunk(split.degree, 2)
    shapes = [(batch, size, num_heads // split.degree, width) for size in split.sizes]
    return in_position_order(exchange.all_to_all(blocks, shapes, kind="heads"), split, dim=1)


def _to_tokens(x_BTHD: Tensor, exchange: Exchange, split: ChunkSplit) -> Tensor:
    batch, num_tokens, num_heads, width = x_BTHD.shape
    assert num_tokens == split.num_tokens, f"{num_tokens} tokens of a chunk of {split.num_tokens}"
    shape = (batch, split.sizes[exchange.rank], num_heads, width)
    return torch.cat(exchange.all_to_all(by_rank(x_BTHD, split, dim=1), [shape] * split.degree, kind="heads"), 2)
