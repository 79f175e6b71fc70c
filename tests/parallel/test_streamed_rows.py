"""Latent attention by streamed rows against one process: outputs and every gradient, slices of any size."""

import pytest
import torch

from longstraw.ops.attention import ChunkKeys, KeyRun, chunk_attention_naive
from longstraw.parallel.arrange import of_rank
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit
from longstraw.parallel.streamed_rows import DividedRows, StreamedRows, StreamSetting
from longstraw.parallel.work import AttentionWidths, stream_state_bytes

HEADS, WIDTH, VALUE_WIDTH, SCALE = 4, 8, 6, 0.4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_path(nodes, split, rank, dtype, constant=()):
    """Global rows of the nodes before a chunk, and the same divided, with cotangent buffers at the owners."""
    runs, divided, start = [], [], 0
    for index, (num_tokens, chunk_tokens) in enumerate(nodes):
        rows = torch.randn(num_tokens, 1, WIDTH, dtype=dtype)
        node = NodeSplit(num_tokens, chunk_tokens, split.degree, split.order)
        mine = rows[node.positions(rank)]
        d_mine = None if index in constant else torch.ones_like(mine)  # what other tokens sent before
        run = KeyRun(mine, mine, start, d_mine, d_mine) if len(mine) > 0 else None
        rows.requires_grad_()
        runs.append(KeyRun(rows, rows, start))
        divided.append(DividedRows(run, node, start, index in constant))
        start += num_tokens
    return runs, divided, start


def equals_one_process(world, order, num_tokens, nodes, slice_rows, dtype, constant=(), num_dense=None):
    split = ChunkSplit(num_tokens, world.degree, order)
    runs, divided, start = make_path(nodes, split, world.rank, dtype, constant)
    q = torch.randn(HEADS, num_tokens, WIDTH, dtype=dtype, requires_grad=True)
    own = torch.randn(num_tokens, WIDTH, dtype=dtype, requires_grad=True)
    d_out = torch.randn(HEADS, num_tokens, VALUE_WIDTH, dtype=dtype)
    num_dense = num_tokens if num_dense is None else num_dense
    d_out[:, num_dense:] = 0
    d_own = torch.randn(num_tokens, WIDTH, dtype=dtype)
    want = chunk_attention_naive(q, own[None], own[None], None, ChunkKeys(runs, start, SCALE, 5))[..., :VALUE_WIDTH]
    ((want * d_out).sum() + (own * d_own).sum()).backward()

    num_mine = sum(map(len, split.pieces_before(num_dense, world.rank)))
    my_q = of_rank(q.detach(), split, world.rank, dim=1)[:, :num_mine].clone().requires_grad_()
    my_own = of_rank(own.detach(), split, world.rank, dim=0).clone().requires_grad_()
    my_d_own = of_rank(d_own, split, world.rank, dim=0)
    setting = StreamSetting(world, split, divided, SCALE, VALUE_WIDTH, slice_rows, num_dense, my_d_own)
    out = StreamedRows.apply(my_q, my_own, setting)
    out.backward(of_rank(d_out, split, world.rank, dim=1)[:, :num_mine])
    close = dict(rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(out, of_rank(want, split, world.rank, dim=1)[:, :num_mine], **close)
    torch.testing.assert_close(my_q.grad, of_rank(q.grad, split, world.rank, dim=1)[:, :num_mine], **close)
    torch.testing.assert_close(my_own.grad, of_rank(own.grad, split, world.rank, dim=0), **close)
    for index, (rows, run) in enumerate(zip(divided, runs, strict=True)):
        if rows.mine is not None and index not in constant:
            torch.testing.assert_close(
                rows.mine.d_key_NKD - 1, run.key_NKD.grad[rows.node.positions(world.rank)], **close
            )


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 16])
@pytest.mark.parametrize("slice_rows", [1, 3, 100])
def test_streamed_rows_equal_one_process(ranks, degree, order, num_tokens, slice_rows):
    for nodes in ([], [(7, 4)], [(13, 4), (3, 4), (1, 1)]):
        ranks(degree).run(equals_one_process, order, num_tokens, nodes, slice_rows, torch.float64)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [7, 63, 64, 65])
def test_streamed_rows_are_exact_in_float32(ranks, degree, num_tokens):
    ranks(degree).run(equals_one_process, "zigzag", num_tokens, [(130, 64), (45, 64)], 16, torch.float32)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_constant_extent_gets_no_cotangent_and_changes_nothing_else(ranks, degree):
    ranks(degree).run(equals_one_process, "zigzag", 7, [(13, 4), (3, 4)], 3, torch.float64, (0,))


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_dense", [1, 4, 8])
def test_the_chunks_first_tokens_may_attend_alone(ranks, order, num_dense):
    ranks(3).run(equals_one_process, order, 11, [(13, 4), (3, 4)], 3, torch.float64, (), num_dense)


def bytes_of_a_chunk(world, num_tokens, num_before):
    counted = Exchange(world.axis)
    split = ChunkSplit(num_tokens, world.degree)
    _, divided, _ = make_path([(num_before, num_before)], split, world.rank, torch.float32)
    q = torch.randn(HEADS, split.sizes[world.rank], WIDTH, requires_grad=True)
    own = torch.randn(split.sizes[world.rank], WIDTH, requires_grad=True)
    out = StreamedRows.apply(q, own, StreamSetting(counted, split, divided, SCALE, VALUE_WIDTH, 4, num_tokens))
    forward = counted.traffic.report().total_bytes
    out.sum().backward()
    backward = counted.traffic.report().total_bytes - forward
    widths = AttentionWidths(HEADS, WIDTH, VALUE_WIDTH, WIDTH, dtype_bytes=4)
    sizes = dict(num_owned_before=divided[0].node.sizes[world.rank], num_before=num_before)
    assert forward == stream_state_bytes(widths, split, world.rank, **sizes)
    assert backward == stream_state_bytes(widths, split, world.rank, **sizes, backward=True)


@pytest.mark.parametrize("num_tokens", [1, 7, 12])
@pytest.mark.parametrize("num_before", [2, 29])
def test_bytes_sent_are_as_counted(ranks, num_tokens, num_before):
    ranks(3).run(bytes_of_a_chunk, num_tokens, num_before)
