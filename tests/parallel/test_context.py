"""Attention by sent queries against one process: outputs and every gradient, also with windows, sinks and odd sizes."""

import pytest
import torch

from longstraw.ops.attention import ChunkKeys, KeyRun, attend_shared, chunk_attention_naive
from longstraw.parallel import context
from longstraw.parallel.arrange import of_rank
from longstraw.parallel.context import OwnedKeys, SentQueries, SplitKeys, merge_over_ranks
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit
from longstraw.parallel.work import AttentionWidths, send_queries_bytes

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_path(nodes, split, rank, dtype):
    """Global keys of the nodes before a chunk, and what the rank owns of them, with cotangent buffers."""
    runs, owned, start = [], [], 0
    for num_tokens, chunk_tokens in nodes:
        k, v = (torch.randn(num_tokens, KEY_HEADS, WIDTH, dtype=dtype) for _ in range(2))
        position = NodeSplit(num_tokens, chunk_tokens, split.degree, split.order).positions(rank, start=start)
        mine = k[position - start], v[position - start]
        runs.append(KeyRun(k.requires_grad_(), v.requires_grad_(), start))
        owned.append(OwnedKeys(KeyRun(*mine, start, *map(torch.zeros_like, mine)), position))
        start += num_tokens
    return runs, owned, start


def leaf(x, split, rank):
    return of_rank(x.detach(), split, rank, dim=1).clone().requires_grad_()


def equals_one_process(world, order, num_tokens, nodes, window, with_sinks, dtype):
    context.QUERIES_PER_WINDOW_CALL = 3  # several blocks at test sizes
    split = ChunkSplit(num_tokens, world.degree, order)
    runs, owned, start = make_path(nodes, split, world.rank, dtype)
    q = torch.randn(HEADS, num_tokens, WIDTH, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(KEY_HEADS, num_tokens, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    sinks = torch.randn(HEADS, dtype=dtype, requires_grad=True) if with_sinks else None
    d_out = torch.randn(HEADS, num_tokens, WIDTH, dtype=dtype)
    d_own = [torch.randn(num_tokens, KEY_HEADS, WIDTH, dtype=dtype) for _ in range(2)]

    want = chunk_attention_naive(q, k, v, sinks, ChunkKeys(runs, start, SCALE, 5, window))
    ((want * d_out).sum() + sum((x.transpose(0, 1) * d).sum() for x, d in zip((k, v), d_own, strict=True))).backward()

    mine = [leaf(x, split, world.rank) for x in (q, k, v)]
    my_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    my_d_own = [of_rank(d, split, world.rank, dim=0) for d in d_own]
    known = None
    for _ in range(2):  # computed, then with the known output handed back
        for each in owned:
            each.run.d_key_NKD.fill_(1), each.run.d_value_NKD.fill_(1)  # what other tokens sent before
        for x in (*mine, *([] if sinks is None else [my_sinks])):
            x.grad = None
        keys = SplitKeys(world, split, owned, start, SCALE, 5, window, *my_d_own, known)
        out, lse = SentQueries.apply(*mine, my_sinks, keys)
        out.backward(of_rank(d_out, split, world.rank, dim=1))
        close = dict(rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(out, of_rank(want, split, world.rank, dim=1), **close)
        for got, whole in zip(mine, (q, k, v), strict=True):
            torch.testing.assert_close(got.grad, of_rank(whole.grad, split, world.rank, dim=1), **close)
        for each, run in zip(owned, runs, strict=True):
            local = each.position_N - run.start
            for sums, whole in ((each.run.d_key_NKD, run.key_NKD), (each.run.d_value_NKD, run.value_NKD)):
                share = torch.zeros_like(whole) if whole.grad is None else whole.grad  # none behind the window
                torch.testing.assert_close(sums - 1, share[local], **close)
        if sinks is not None:
            total = world.all_reduce_sum(my_sinks.grad, kind="sinks")
            torch.testing.assert_close(total, sinks.grad, **close)
        known = out.detach(), lse


def merges_over_ranks(world, num_queries):
    split = ChunkSplit(1, world.degree)
    runs, owned, _ = make_path([(13, 4), (1, 1)], split, world.rank, torch.float64)
    q = torch.randn(HEADS, num_queries, WIDTH, dtype=torch.float64)
    mine = attend_shared(q, [each.run for each in owned], SCALE)
    out, lse = merge_over_ranks(*mine, world)
    want, want_lse = attend_shared(q, [KeyRun(x.key_NKD.detach(), x.value_NKD.detach(), 0) for x in runs], SCALE)
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=0, atol=1e-12)
    return out.tolist()


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_queries_that_all_ranks_have_attend_over_all_ranks_keys(ranks, degree, num_queries):
    got = ranks(degree).run(merges_over_ranks, num_queries)
    assert all(each == got[0] for each in got), "bit by bit"


NODES = {"none": [], "one": [(7, 4)], "two": [(13, 4), (3, 4)], "short": [(1, 4), (2, 1)]}


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 16])
@pytest.mark.parametrize("nodes", NODES)
def test_sent_queries_equal_one_process(ranks, degree, order, num_tokens, nodes):
    ranks(degree).run(equals_one_process, order, num_tokens, NODES[nodes], None, False, torch.float64)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("window", [1, 3, 6, 100])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_window_hides_the_same_keys_as_in_one_process(ranks, degree, order, window, num_tokens):
    ranks(degree).run(equals_one_process, order, num_tokens, NODES["two"], window, True, torch.float64)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [7, 63, 64, 65])
def test_sent_queries_are_exact_in_float32_with_sinks(ranks, degree, num_tokens):
    ranks(degree).run(equals_one_process, "zigzag", num_tokens, [(130, 64), (45, 64)], None, True, torch.float32)


def half_precision_error(world):
    torch.manual_seed(0)
    split = ChunkSplit(33, world.degree)
    runs, owned, start = make_path([(65, 32)], split, world.rank, torch.float32)
    q, k, v = (torch.randn(heads, 33, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    want = chunk_attention_naive(q, k, v, None, ChunkKeys(runs, start, SCALE, 5))
    half = [OwnedKeys(KeyRun(x.run.key_NKD.bfloat16(), x.run.value_NKD.bfloat16(), 0), x.position_N) for x in owned]
    mine = [of_rank(x, split, world.rank, dim=1).bfloat16() for x in (q, k, v)]
    out, lse = SentQueries.apply(*mine, None, SplitKeys(world, split, half, start, SCALE, 5))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    mine_of_want = of_rank(want, split, world.rank, dim=1)
    return float(((out.float() - mine_of_want).norm() / mine_of_want.norm()).detach())


def test_bfloat16_error_is_that_of_bfloat16(ranks):
    assert max(ranks(3).run(half_precision_error)) < 2**-7


def constant_extent_gradients(world):
    split = ChunkSplit(9, world.degree)
    _, owned, start = make_path([(14, 4)], split, world.rank, torch.float64)
    q, k, v = (torch.randn(heads, 9, WIDTH, dtype=torch.float64) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mine = [leaf(x, split, world.rank) for x in (q, k, v)]
    constant = [OwnedKeys(KeyRun(x.run.key_NKD, x.run.value_NKD, 0), x.position_N) for x in owned]
    both = []
    for earlier in (owned, constant):
        out, _ = SentQueries.apply(*mine, None, SplitKeys(world, split, earlier, start, SCALE, 5))
        both.append(torch.autograd.grad(out, mine, torch.ones_like(out)))
    torch.testing.assert_close(*both, rtol=0, atol=0)
    return bool(owned[0].run.d_key_NKD.abs().sum() > 0)


def test_a_constant_extent_gets_no_cotangent_and_changes_nothing_else(ranks):
    assert all(ranks(3).run(constant_extent_gradients))


def bytes_of_a_chunk(world, num_tokens, num_before):
    counted = Exchange(world.axis)
    split = ChunkSplit(num_tokens, world.degree)
    _, owned, start = make_path([(num_before, 8)], split, world.rank, torch.float32)
    q, k, v = (torch.randn(heads, num_tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mine = [leaf(x, split, world.rank) for x in (q, k, v)]
    out, _ = SentQueries.apply(*mine, None, SplitKeys(counted, split, owned, start, SCALE, 5))
    forward = counted.traffic.report().total_bytes
    out.sum().backward()
    widths = AttentionWidths(HEADS, WIDTH, WIDTH, 2 * KEY_HEADS * WIDTH, dtype_bytes=4)
    assert forward == send_queries_bytes(widths, split, world.rank)
    backward = counted.traffic.report().total_bytes - forward
    assert backward == send_queries_bytes(widths, split, world.rank, backward=True)
    return forward + backward


@pytest.mark.parametrize("num_tokens", [1, 7, 12])
def test_bytes_sent_are_as_counted_and_do_not_depend_on_the_path(ranks, num_tokens):
    short, long = (ranks(3).run(bytes_of_a_chunk, num_tokens, num_before) for num_before in (3, 200))
    assert short == long
