"""Attention to selected rows against one gather from the concatenated path: outputs and every gradient."""

from dataclasses import replace

import pytest
import torch

from longstraw.evidence.memory import MemoryTracker
from longstraw.ops import sparse_latent
from longstraw.ops.attention import ChunkAttention, ChunkKeys, KeyRun
from longstraw.ops.sparse_latent import (
    SelectedRows,
    SparseLatentAttention,
    attend_selected_per_row,
    sparse_latent_attention_naive,
)
from longstraw.ops.staging import VIEWS, Stage

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
WIDTH, VALUE_WIDTH, SCALE = 12, 9, 0.4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several query blocks at test sizes: 4 queries at 4 heads and 6 selected rows."""
    monkeypatch.setattr(sparse_latent, "CPU_BLOCK_BYTES", 4 * 6 * 4 * (2 * WIDTH + 2 * 4))


def make_runs(lengths, dtype, *, constant=()):
    runs, start = [], 0
    for i, length in enumerate(lengths):
        row = torch.randn(length, 1, WIDTH, dtype=dtype)
        d_row = None if i in constant else torch.zeros(row.shape, dtype=torch.promote_types(dtype, torch.float32))
        runs.append(KeyRun(row, row, start, d_row, d_row))
        start += length
    return runs, start


def choose(num_queries, first_position, num_selected, *, oldest=0):
    """Ascending different positions from `oldest` to the query's own, as many for each query."""
    assert first_position + 1 - oldest >= num_selected, "the first query sees too few"
    rows = [
        oldest + torch.randperm(first_position + t + 1 - oldest)[:num_selected].sort().values
        for t in range(num_queries)
    ]
    return torch.stack(rows).int()


def run_and_gradients(attention, q, own, keys, d_out, leaves):
    out = attention(q, own, keys)
    grads = torch.autograd.grad((out * d_out).sum(), leaves, allow_unused=True)
    return out.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def check_against_naive(dtype, *, lengths, num_queries, num_own, num_heads=4, num_selected=6, oldest=0, constant=()):
    runs, start = make_runs(lengths, dtype, constant=constant)
    first_query = start + num_own - num_queries
    q = torch.randn(num_heads, num_queries, WIDTH, dtype=dtype, requires_grad=True)
    own = torch.randn(num_own, WIDTH, dtype=dtype, requires_grad=True)
    d_out = torch.randn(num_heads, num_queries, VALUE_WIDTH, dtype=dtype)
    d_own = torch.randn(num_own, WIDTH, dtype=dtype)
    selected = choose(num_queries, first_query, num_selected, oldest=oldest)
    leaf_runs = [KeyRun(run.key_NKD.clone().requires_grad_(), run.value_NKD, run.start) for run in runs]
    naive_keys = SelectedRows(leaf_runs, start, selected, SCALE, VALUE_WIDTH)
    leaves = [q, own, *(run.key_NKD for run in leaf_runs)]
    want_out, want = run_and_gradients(sparse_latent_attention_naive, q, own, naive_keys, d_out, leaves)
    want[1] = want[1] + d_own

    keys = SelectedRows(runs, start, selected, SCALE, VALUE_WIDTH, d_own)
    kept = d_own.clone()
    out, grads = run_and_gradients(SparseLatentAttention.apply, q, own, keys, d_out, [q, own])
    assert torch.equal(d_own, kept), "the cotangents of later tokens were changed"
    torch.testing.assert_close(out, want_out, rtol=0, atol=TOLERANCE[dtype])
    grads += [torch.zeros_like(run.key_NKD) if run.d_key_NKD is None else run.d_key_NKD for run in runs]
    for i in constant:
        want[2 + i] = torch.zeros_like(want[2 + i])
    for got, expected in zip(grads, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [(), (30,), (11, 3), (19, 1, 7)])
@pytest.mark.parametrize("num_queries", [1, 7, 63, 64, 65])
def test_sparse_attention_equals_a_gather_from_the_whole_path(dtype, lengths, num_queries):
    check_against_naive(dtype, lengths=lengths, num_queries=num_queries, num_own=num_queries + 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("constant", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_constant_extents_get_nothing_and_the_others_their_all(dtype, constant):
    check_against_naive(dtype, lengths=(13, 9, 4), num_queries=9, num_own=9, constant=constant)


@pytest.mark.parametrize(("oldest", "num_selected"), [(20, 6), (25, 2), (0, 1), (0, 17)])
def test_selections_in_one_place_and_of_any_number(oldest, num_selected):
    check_against_naive(
        torch.float64, lengths=(14, 6), num_queries=7, num_own=13, oldest=oldest, num_selected=num_selected
    )


@pytest.mark.parametrize("num_heads", [1, 5])
def test_any_number_of_heads(num_heads):
    check_against_naive(torch.float64, lengths=(14, 6), num_queries=7, num_own=7, num_heads=num_heads)


def test_one_extent_alone_can_be_selected():
    runs, start = make_runs((10, 10), torch.float64)
    q = torch.randn(4, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    own = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    for first in (0, 10):
        selected = choose(1, 9, 6).repeat(9, 1) + first
        keys = SelectedRows(runs, start, selected, SCALE, VALUE_WIDTH)
        out = SparseLatentAttention.apply(q, own, keys)
        torch.testing.assert_close(out, sparse_latent_attention_naive(q, own, keys), rtol=0, atol=1e-12)
        d_q, d_own = torch.autograd.grad(out.sum(), [q, own])
        assert d_q.any() and not d_own.any()
    assert runs[0].d_key_NKD.any() and runs[1].d_key_NKD.any()


def test_selecting_everything_is_dense_attention():
    runs, start = make_runs((20,), torch.float64)
    q = torch.randn(4, 1, WIDTH, dtype=torch.float64, requires_grad=True)
    own = torch.randn(1, WIDTH, dtype=torch.float64, requires_grad=True)
    out = SparseLatentAttention.apply(
        q, own, SelectedRows(runs, start, torch.arange(21, dtype=torch.int32)[None], SCALE, VALUE_WIDTH)
    )
    dense, _ = ChunkAttention.apply(q, own[None], own[None], None, ChunkKeys(runs, start, SCALE, 100))
    torch.testing.assert_close(out, dense[..., :VALUE_WIDTH], rtol=0, atol=1e-12)


def test_cotangents_are_added_to_what_an_extent_has():
    runs, start = make_runs((20,), torch.float64)
    q, own = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 9, WIDTH), (9, WIDTH)))
    keys = SelectedRows(runs, start, choose(9, start, 6), SCALE, VALUE_WIDTH)
    for _ in range(2):
        SparseLatentAttention.apply(q, own, keys).sum().backward()
    twice = runs[0].d_key_NKD.clone()
    runs[0].d_key_NKD.zero_()
    SparseLatentAttention.apply(q, own, keys).sum().backward()
    torch.testing.assert_close(twice, 2 * runs[0].d_key_NKD, rtol=0, atol=1e-12)


def test_rows_in_host_memory_give_the_same_bits():
    runs, start = make_runs((30, 5), torch.float32)
    q, own = (torch.randn(*shape, requires_grad=True) for shape in ((4, 9, WIDTH), (9, WIDTH)))
    selected = choose(9, start, 6)
    results = []
    for staging in (VIEWS, Stage(torch.device("cpu"), 2**12)):
        fresh = [replace(run, d_key_NKD=torch.ones_like(run.key_NKD), staging=staging) for run in runs]
        keys = SelectedRows(fresh, start, selected, SCALE, VALUE_WIDTH)
        out = SparseLatentAttention.apply(q, own, keys)
        grads = torch.autograd.grad(out.sin().sum(), [q, own])
        alone = attend_selected_per_row(
            q.detach().transpose(0, 1), selected, fresh, own.detach().expand(9, -1, -1), scale=SCALE, value_width=4
        )
        results.append([out, alone, *grads, *(run.d_key_NKD for run in fresh)])
    for resident, staged in zip(*results, strict=True):
        assert torch.equal(resident, staged)


def test_bfloat16_error_is_that_of_bfloat16():
    runs, start = make_runs((40, 9), torch.float32)
    half = []
    for run in runs:
        row = run.key_NKD.bfloat16()
        half.append(KeyRun(row, row, run.start, torch.zeros(row.shape), torch.zeros(row.shape)))
    runs = [KeyRun(run.key_NKD.float().requires_grad_(), run.value_NKD, run.start) for run in half]
    q, own = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((4, 9, WIDTH), (9, WIDTH)))
    wide_q, wide_own = (x.detach().float().requires_grad_() for x in (q, own))
    selected = choose(9, start, 16)
    d_own = torch.randn(9, WIDTH)
    want = sparse_latent_attention_naive(wide_q, wide_own, SelectedRows(runs, start, selected, SCALE, VALUE_WIDTH))
    leaves = [wide_q, wide_own, *(run.key_NKD for run in runs)]
    want_grads = list(torch.autograd.grad(want.sum(), leaves))
    want_grads[1] = want_grads[1] + d_own
    out = SparseLatentAttention.apply(q, own, SelectedRows(half, start, selected, SCALE, VALUE_WIDTH, d_own))
    grads = torch.autograd.grad(out.sum(), [q, own])
    assert out.dtype == grads[0].dtype == grads[1].dtype == torch.bfloat16
    assert half[0].d_key_NKD.dtype == torch.float32
    for got, expected in zip((out, *grads, *(r.d_key_NKD for r in half)), (want, *want_grads), strict=True):
        assert (got.float() - expected).norm() / expected.norm() < 2**-8


def test_a_position_outside_the_path_is_refused():
    runs, start = make_runs((20,), torch.float32)
    q, own = torch.randn(4, 3, WIDTH), torch.randn(3, WIDTH)
    selected = torch.tensor([[1, 2], [1, 23], [1, 2]], dtype=torch.int32)
    with pytest.raises(AssertionError, match="1 selected positions lie outside the path"):
        SparseLatentAttention.apply(q, own, SelectedRows(runs, start, selected, SCALE, VALUE_WIDTH))
    with pytest.raises(AssertionError, match="the runs end at position 20, the chunk starts at 21"):
        SparseLatentAttention.apply(q, own, SelectedRows(runs, 21, selected, SCALE, VALUE_WIDTH))


@pytest.mark.parametrize("lengths", [(), (25,), (17, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_decoded_together_attend_as_if_each_were_alone(lengths, dtype):
    runs, start = make_runs(lengths, dtype)
    q, own = torch.randn(5, 4, WIDTH, dtype=dtype), torch.randn(5, 8, WIDTH, dtype=dtype)
    selected = choose(5, start + 3, 4)  # every position is below start + 8
    out = attend_selected_per_row(q, selected, runs, own, scale=SCALE, value_width=VALUE_WIDTH)
    assert out.dtype == dtype
    for g in range(5):
        keys = SelectedRows(runs, start, selected[g : g + 1], SCALE, VALUE_WIDTH)
        alone = SparseLatentAttention.apply(q[g, :, None], own[g], keys)[:, 0]
        torch.testing.assert_close(out[g], alone, rtol=0, atol=TOLERANCE.get(dtype, 0.0))


def test_working_memory_depends_neither_on_the_queries_nor_on_the_path():
    peaks = []
    for num_rows, num_queries in ((100, 16), (2000, 16), (2000, 64)):
        runs, start = make_runs((num_rows,), torch.float32)
        q = torch.randn(4, num_queries, WIDTH, requires_grad=True)
        own = torch.randn(num_queries, WIDTH, requires_grad=True)
        keys = SelectedRows(runs, start, choose(num_queries, start, 6), SCALE, VALUE_WIDTH)
        results = 4 * num_queries * (4 * (VALUE_WIDTH + 1) + 4 * WIDTH + WIDTH)  # out, lse; dq, d_own
        with MemoryTracker() as tracker:
            out = SparseLatentAttention.apply(q, own, keys)
            torch.autograd.grad(out, [q, own], torch.ones(()).expand(out.shape))
        peaks.append(tracker.peak_bytes - results)
    assert max(peaks) <= 1.2 * min(peaks)


def test_output_and_inputs_die_with_the_graph():
    runs, start = make_runs((20,), torch.float32)
    with MemoryTracker() as tracker:
        q, own = torch.randn(4, 9, WIDTH, requires_grad=True), torch.randn(9, WIDTH, requires_grad=True)
        keys = SelectedRows(runs, start, choose(9, start, 6), SCALE, VALUE_WIDTH)
        out = SparseLatentAttention.apply(q, own, keys)
        before = tracker.live_bytes
        del out
        assert tracker.live_bytes < before
        del q, own, keys
        assert tracker.live_bytes == 0
