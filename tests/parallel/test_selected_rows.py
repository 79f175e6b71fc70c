"""Exact global selection and attention to it over divided state, against one process: positions, outputs, gradients."""

import pytest
import torch

from longstraw.ops.attention import KeyRun
from longstraw.ops.index_scan import IndexQueries, IndexRun, select_positions_naive
from longstraw.ops.sparse_latent import SelectedRows, sparse_latent_attention_naive
from longstraw.parallel.arrange import of_rank
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit
from longstraw.parallel.selected_rows import DividedIndexKeys, SelectedSetting, attend_selected, select_streamed
from longstraw.parallel.streamed_rows import DividedRows

HEADS, WIDTH, VALUE_WIDTH, SCALE = 4, 8, 6, 0.4
INDEX_HEADS, INDEX_WIDTH = 16, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NODES = {"long": [(29, 8), (3, 8)], "short": [(1, 8), (7, 2)]}


def make_path(nodes, split, rank, constant=(), dtype=torch.float64):
    runs, divided, start = [], [], 0
    for index, (num_tokens, chunk_tokens) in enumerate(nodes):
        node = NodeSplit(num_tokens, chunk_tokens, split.degree, split.order)
        rows = torch.randn(num_tokens, 1, WIDTH, dtype=dtype)
        mine = rows[node.positions(rank)]
        d_mine = None if index in constant else torch.ones_like(mine)  # what other tokens sent before
        run = KeyRun(mine, mine, start, d_mine, d_mine) if len(mine) > 0 else None
        runs.append(KeyRun(rows.requires_grad_(), rows, start))
        divided.append(DividedRows(run, node, start, index in constant))
        start += num_tokens
    return runs, divided, start


def mine_from(x, split, rank, begin, *, dim):
    """A rank's tokens of those from `begin` on."""
    num_before = sum(map(len, split.pieces_before(begin, rank)))
    mine = of_rank(x, split, rank, dim=dim)
    return mine.narrow(dim, num_before, mine.shape[dim] - num_before)


def selects_what_one_process_does(world, order, num_tokens, nodes, topk):
    split = ChunkSplit(num_tokens, world.degree, order)
    keys, divided, start = [], [], 0
    for length, chunk_tokens in nodes:
        node = NodeSplit(length, chunk_tokens, world.degree, order)
        key = torch.randint(-2, 3, (length, INDEX_WIDTH)).float()  # whole numbers: many equal scores, all exact
        mine = key[node.positions(world.rank)]
        divided.append(DividedIndexKeys(IndexRun(mine, 0) if len(mine) > 0 else None, node, start))
        keys.append(IndexRun(key, start))
        start += length
    own = torch.randint(-2, 3, (num_tokens, INDEX_WIDTH)).float()
    q = torch.randint(-2, 3, (num_tokens, INDEX_HEADS, INDEX_WIDTH)).float()
    weight = torch.randint(-2, 3, (num_tokens, INDEX_HEADS)).float()
    num_dense = min(max(topk - start, 0), num_tokens)
    queries = IndexQueries(q[num_dense:], weight[num_dense:], start + num_dense)
    want = select_positions_naive(queries, [*keys, IndexRun(own, start)], topk=topk)
    padded = torch.cat([want.new_zeros(num_dense, want.shape[1]), want])

    got = select_streamed(
        mine_from(q, split, world.rank, num_dense, dim=0),
        mine_from(weight, split, world.rank, num_dense, dim=0),
        of_rank(own, split, world.rank, dim=0),
        divided,
        setting=SelectedSetting(world, split, [], start),
        num_dense=num_dense,
        topk=topk,
    )
    assert got.equal(mine_from(padded, split, world.rank, num_dense, dim=0))


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 17])
def test_every_query_selects_over_the_whole_path(ranks, degree, order, num_tokens):
    for nodes, topk in (("long", 5), ("long", 32), ("long", 34), ("short", 8), ("short", 1)):
        if sum(length for length, _ in NODES[nodes]) + num_tokens > topk:
            ranks(degree).run(selects_what_one_process_does, order, num_tokens, NODES[nodes], topk)


def equals_one_process(world, order, num_tokens, nodes, topk, constant=(), dtype=torch.float64):
    split = ChunkSplit(num_tokens, world.degree, order)
    runs, divided, start = make_path(nodes, split, world.rank, constant, dtype)
    num_dense = min(max(topk - start, 0), num_tokens)
    q = torch.randn(HEADS, num_tokens, WIDTH, dtype=dtype, requires_grad=True)
    own = torch.randn(num_tokens, WIDTH, dtype=dtype, requires_grad=True)
    d_own = torch.randn(num_tokens, WIDTH, dtype=dtype)
    d_out = torch.randn(HEADS, num_tokens, VALUE_WIDTH, dtype=dtype)
    selected = torch.stack(
        [torch.randperm(start + max(t, topk - 1) + 1)[:topk].sort().values for t in range(num_tokens)]
    ).clamp(max=start + num_tokens - 1)
    keys = SelectedRows(runs, start, selected[num_dense:].int(), SCALE, VALUE_WIDTH)
    want = sparse_latent_attention_naive(q[:, num_dense:], own, keys)
    ((want * d_out[:, num_dense:]).sum() + (own * d_own).sum()).backward()

    rank = world.rank
    my_q = mine_from(q.detach(), split, rank, num_dense, dim=1).clone().requires_grad_()
    my_own = of_rank(own.detach(), split, rank, dim=0).clone().requires_grad_()
    setting = SelectedSetting(world, split, divided, start, of_rank(d_own, split, rank, dim=0))
    my_selected = mine_from(selected, split, rank, num_dense, dim=0).int()
    out = attend_selected(my_q, my_own, my_selected, setting, scale=SCALE, value_width=VALUE_WIDTH)
    out.backward(mine_from(d_out, split, rank, num_dense, dim=1))

    close = dict(rtol=0, atol=TOLERANCE[dtype])
    padded = torch.cat([want.new_zeros(HEADS, num_dense, VALUE_WIDTH), want], 1)
    torch.testing.assert_close(out, mine_from(padded, split, rank, num_dense, dim=1), **close)
    torch.testing.assert_close(my_q.grad, mine_from(q.grad, split, rank, num_dense, dim=1), **close)
    torch.testing.assert_close(my_own.grad, of_rank(own.grad, split, rank, dim=0), **close)
    for index, (rows, run) in enumerate(zip(divided, runs, strict=True)):
        if rows.mine is not None and index not in constant:
            torch.testing.assert_close(rows.mine.d_key_NKD - 1, run.key_NKD.grad[rows.node.positions(rank)], **close)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 17])
def test_attention_to_selected_rows_equals_one_process(ranks, degree, order, num_tokens):
    for topk in (1, 7, 32):
        ranks(degree).run(equals_one_process, order, num_tokens, NODES["long"], topk)
    ranks(degree).run(equals_one_process, order, num_tokens, NODES["long"], 7, (0,))
    ranks(degree).run(equals_one_process, order, num_tokens, NODES["long"], 7, (), torch.float32)


def bytes_for_rows(world, constant):
    counted = Exchange(world.axis)
    split = ChunkSplit(6, world.degree, "block_cyclic")
    _, divided, start = make_path([(24, 8)], split, world.rank, (0,) if constant else (), torch.float32)
    q = torch.randn(HEADS, 3, WIDTH, requires_grad=True)
    own = torch.randn(3, WIDTH, requires_grad=True)
    # All queries choose the same three of rank 0's rows of the prompt and rank 1's first token of the chunk.
    selected = torch.tensor([[0, 1, 8, 27]] * 3).int()
    setting = SelectedSetting(counted, split, divided, start)
    attend_selected(q, own, selected, setting, scale=SCALE, value_width=VALUE_WIDTH).sum().backward()
    sent = counted.traffic.report().bytes_by_kind
    return sent["rows"], sent["row_cotangents"]


@pytest.mark.parametrize("constant", [False, True])
def test_each_selected_row_travels_once_and_constant_ones_get_nothing_back(ranks, constant):
    row_bytes = WIDTH * 4
    down = [3 * row_bytes, 1 * row_bytes]
    back = [1 * row_bytes, 0 if constant else 3 * row_bytes]
    assert ranks(2).run(bytes_for_rows, constant) == list(zip(down, back, strict=True))
