"""The chunk attention against one softmax over the concatenated path: outputs and every gradient, at odd sizes."""

import pytest
import torch

from longstraw.ops import attention, kernels
from longstraw.ops.attention import AttentionOutput, ChunkAttention, ChunkKeys, KeyRun, chunk_attention_naive

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Several kernel calls per extent and per window at test sizes."""
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", 5)
    monkeypatch.setattr(attention, "QUERIES_PER_WINDOW_CALL", 4)


def make_runs(lengths, num_key_heads, width, dtype):
    runs, start = [], 0
    for length in lengths:
        k, v = (torch.randn(length, num_key_heads, width, dtype=dtype) for _ in range(2))
        runs.append(KeyRun(k, v, start, torch.zeros_like(k), torch.zeros_like(v)))
        start += length
    return runs, start


def oracle_gradients(q, k, v, sinks, keys, d_out):
    runs = [
        KeyRun(r.key_NKD.clone().requires_grad_(), r.value_NKD.clone().requires_grad_(), r.start) for r in keys.earlier
    ]
    out = chunk_attention_naive(q, k, v, sinks, ChunkKeys(runs, keys.start, keys.scale, 5, keys.window))
    loss = (out * d_out).sum() + (k.transpose(0, 1) * keys.d_own_key_TKD).sum()
    loss = loss + (v.transpose(0, 1) * keys.d_own_value_TKD).sum()
    leaves = [q, k, v, *([] if sinks is None else [sinks]), *(x for r in runs for x in (r.key_NKD, r.value_NKD))]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return out, [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "tokens", "width"), [(4, 2, 7, 8), (3, 3, 1, 16), (6, 1, 9, 4)])
def test_chunk_attention_equals_one_softmax_over_the_path(dtype, window, with_sinks, heads, key_heads, tokens, width):
    torch.manual_seed(0)
    runs, start = make_runs((11, 3), key_heads, width, dtype)
    q = torch.randn(heads, tokens, width, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(key_heads, tokens, width, dtype=dtype, requires_grad=True) for _ in range(2))
    sinks = torch.randn(heads, dtype=dtype, requires_grad=True) if with_sinks else None
    d_own = [torch.randn(tokens, key_heads, width, dtype=dtype) for _ in range(2)]
    d_out = torch.randn(heads, tokens, width, dtype=dtype)
    keys = ChunkKeys(runs, start, 0.3, 5, window, *d_own)
    want_out, want = oracle_gradients(q, k, v, sinks, keys, d_out)

    known = None
    for _ in range(2):  # computed, then with the known output handed back
        for run in runs:
            run.d_key_NKD.zero_(), run.d_value_NKD.zero_()
        out, lse = ChunkAttention.apply(q, k, v, sinks, ChunkKeys(runs, start, 0.3, 5, window, *d_own, known))
        grads = torch.autograd.grad(out, [q, k, v, *([] if sinks is None else [sinks])], d_out)
        grads = [*grads, *(x for run in runs for x in (run.d_key_NKD, run.d_value_NKD))]
        torch.testing.assert_close(out, want_out, rtol=0, atol=TOLERANCE[dtype])
        for got, expected in zip(grads, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])
        known = AttentionOutput(out.detach(), lse)


def test_a_constant_extent_gets_no_cotangent_and_changes_nothing_else():
    torch.manual_seed(0)
    runs, start = make_runs((11,), 2, 8, torch.float64)
    constant = [KeyRun(run.key_NKD, run.value_NKD, run.start) for run in runs]
    q, k, v = (torch.randn(heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    grads = [
        torch.autograd.grad(ChunkAttention.apply(q, k, v, None, ChunkKeys(r, start, 0.3, 5))[0].sum(), (q, k, v))
        for r in (runs, constant)
    ]
    for with_buffers, without in zip(*grads, strict=True):
        torch.testing.assert_close(with_buffers, without, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64, 65])
def test_kernel_and_plain_products_agree_forward_and_backward(causal, size):
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 3, size, 16, dtype=torch.float64) for _ in range(4))
    out, lse = kernels.attend(q, k, v, scale=0.25, causal=causal)
    plain_out, plain_lse = kernels.plain_attend(q, k, v, scale=0.25, causal=causal)
    torch.testing.assert_close((out, lse), (plain_out, plain_lse), rtol=0, atol=1e-12)
    grads = kernels.attend_backward(d_out, (q, k, v), out, lse, scale=0.25, causal=causal)
    plain = kernels.plain_attend_backward(d_out, (q, k, v), out, lse, scale=0.25, causal=causal)
    torch.testing.assert_close(grads, plain, rtol=0, atol=1e-12)


def test_bfloat16_error_is_that_of_bfloat16():
    torch.manual_seed(0)
    runs, start = make_runs((33,), 2, 16, torch.float32)
    q, k, v = (torch.randn(heads, 9, 16) for heads in (4, 2, 2))
    want = chunk_attention_naive(q, k, v, None, ChunkKeys(runs, start, 0.25, 5))
    half = [KeyRun(r.key_NKD.bfloat16(), r.value_NKD.bfloat16(), r.start) for r in runs]
    out, _ = ChunkAttention.apply(*(x.bfloat16() for x in (q, k, v)), None, ChunkKeys(half, start, 0.25, 5))
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).norm() / want.norm() < 2**-7
