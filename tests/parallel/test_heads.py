"""From tokens to heads and back: against slicing one process's tensor, values and gradients."""

import pytest
import torch

from longstraw.parallel.arrange import of_rank
from longstraw.parallel.heads import heads_to_tokens, tokens_to_heads
from longstraw.parallel.ownership import ChunkSplit


def equals_slices(world, order, num_tokens, dtype):
    split = ChunkSplit(num_tokens, world.degree, order)
    per_rank = 3
    whole = torch.randn(2, num_tokens, per_rank * world.degree, 5).to(dtype)
    weight = torch.randn_like(whole)
    heads = slice(per_rank * world.rank, per_rank * (world.rank + 1))
    mine = of_rank(whole, split, world.rank, dim=1).clone().requires_grad_()

    by_head = tokens_to_heads(mine, world, split)
    assert by_head.equal(whole[:, :, heads])
    back = heads_to_tokens(by_head * weight[:, :, heads], world, split)
    assert back.equal(of_rank(whole * weight, split, world.rank, dim=1))
    d_back = torch.randn_like(whole)
    back.backward(of_rank(d_back, split, world.rank, dim=1))
    assert mine.grad.equal(of_rank(d_back * weight, split, world.rank, dim=1))


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 8, 65])
def test_heads_and_tokens_are_exchanged_exactly(ranks, degree, order, num_tokens):
    for dtype in (torch.float32, torch.bfloat16):
        ranks(degree).run(equals_slices, order, num_tokens, dtype)


def bytes_of_the_exchange(world):
    split = ChunkSplit(8, world.degree)
    before = world.traffic.report().bytes_by_kind.get("heads", 0)
    tokens_to_heads(torch.zeros(1, split.sizes[world.rank], 4, 6), world, split)
    return world.traffic.report().bytes_by_kind["heads"] - before


def test_each_rank_sends_the_other_ranks_heads_of_its_tokens(ranks):
    assert ranks(2).run(bytes_of_the_exchange) == [4 * 2 * 6 * 4] * 2
