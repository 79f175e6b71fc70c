"""Attention over one rectangle of queries and keys, with the log-sum-exp in and out: the kernels other rooms build on.

Three kernels share one signature: the library's CPU flash kernel, its CUDA flash kernel, and plain matrix products for
what neither takes (CUDA with a mask, or in float32). `plain_*` are also the oracle of the other two.

Shape suffixes: B batch, H heads, T queries, N keys, D head width. The log-sum-exp (LSE) is at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Of the scores that the plain kernel holds at once.
PLAIN_TILE_BYTES = 2**28

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q_BHTD: Tensor, k_BHND: Tensor, v_BHND: Tensor, *, scale: float, causal: bool = False, mask_TN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over these keys alone: output `[B, H, T, D]` in the queries' dtype and LSE `[B, H, T]`.

    `causal` aligns query t with key t. `mask_TN` (bool) marks visible pairs; every row must see a key. No gradient.
    """
    if q_BHTD.device.type == "cpu":
        out, lse = _cpu_forward(
            q_BHTD, k_BHND, v_BHND, 0.0, causal, attn_mask=_additive(mask_TN, q_BHTD.dtype), scale=scale
        )
        return out, lse
    if _cuda_flash_takes(q_BHTD, mask_TN):
        out, lse, *_ = _cuda_forward(q_BHTD, k_BHND, v_BHND, 0.0, causal, False, scale=scale)
        return out, lse
    return plain_attend(q_BHTD, k_BHND, v_BHND, scale=scale, causal=causal, mask_TN=mask_TN)


def attend_backward(
    d_out_BHTD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask_TN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of these keys' part of a larger softmax, given that softmax's *global* output and LSE.

    The parts of disjoint key sets add up to the whole gradient. Source: FlashAttention-2, Dao 2023, algorithm 2.
    """
    q, k, v = qkv
    if q.device.type == "cpu":
        mask = _additive(mask_TN, q.dtype)
        return _cpu_backward(d_out_BHTD, q, k, v, out_BHTD, lse_BHT, 0.0, causal, attn_mask=mask, scale=scale)
    if _cuda_flash_takes(q, mask_TN):
        # Dropout is off, so the kernel never reads its random state; it still wants two tensors.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        return _cuda_backward(
            d_out_BHTD, q, k, v, out_BHTD, lse_BHT, *lengths, 0.0, causal, random, random[:0], scale=scale
        )
    return plain_attend_backward(d_out_BHTD, qkv, out_BHTD, lse_BHT, scale=scale, causal=causal, mask_TN=mask_TN)


def plain_attend(
    q_BHTD: Tensor, k_BHND: Tensor, v_BHND: Tensor, *, scale: float, causal: bool = False, mask_TN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`attend` by plain matrix products, so many queries at a time that `[B, H, T, N]` stays below PLAIN_TILE_BYTES."""
    out = q_BHTD.new_empty(*q_BHTD.shape[:-1], v_BHND.shape[-1])
    lse = torch.empty(q_BHTD.shape[:-1], dtype=wide_dtype(q_BHTD.dtype), device=q_BHTD.device)
    for rows in _query_blocks(q_BHTD, k_BHND):
        scores = _plain_scores(q_BHTD, k_BHND, scale, rows, causal, mask_TN)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp().to(v_BHND.dtype) @ v_BHND
    return out, lse


def plain_attend_backward(
    d_out_BHTD: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask_TN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` by plain matrix products, block by block like `plain_attend`."""
    q, k, v = qkv
    wide = wide_dtype(q.dtype)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v))
    for rows in _query_blocks(q, k):
        p = (_plain_scores(q, k, scale, rows, causal, mask_TN) - lse_BHT[:, :, rows, None]).exp()
        d_out = d_out_BHTD[:, :, rows]
        delta = (d_out.to(wide) * out_BHTD[:, :, rows].to(wide)).sum(-1, keepdim=True)
        d_scores = (p * ((d_out @ v.mT).to(wide) - delta) * scale).to(q.dtype)
        dq[:, :, rows] = d_scores @ k
        dk += d_scores.mT @ q[:, :, rows]
        dv += p.to(q.dtype).mT @ d_out
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _query_blocks(q_BHTD: Tensor, k_BHND: Tensor) -> Iterator[slice]:
    batch, heads, num_queries, _ = q_BHTD.shape
    row_bytes = batch * heads * k_BHND.shape[2] * wide_dtype(q_BHTD.dtype).itemsize
    step = max(1, PLAIN_TILE_BYTES // row_bytes)
    for begin in range(0, num_queries, step):
        yield slice(begin, min(begin + step, num_queries))


def _plain_scores(q: Tensor, k: Tensor, scale: float, rows: slice, causal: bool, mask_TN: Tensor | None) -> Tensor:
    scores = (q[:, :, rows] @ k.mT).to(wide_dtype(q.dtype)) * scale
    if causal:
        query_T = torch.arange(rows.start, rows.stop, device=q.device)
        visible = torch.arange(k.shape[-2], device=q.device) <= query_T[:, None]
    elif mask_TN is not None:
        visible = mask_TN[rows]
    else:
        return scores
    return scores.masked_fill(~visible, float("-inf"))


def _additive(mask_TN: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_TN is None:
        return None
    zeros = torch.zeros(mask_TN.shape, dtype=dtype, device=mask_TN.device)
    return zeros.masked_fill_(~mask_TN, float("-inf"))[None, None]


def _cuda_flash_takes(q: Tensor, mask_TN: Tensor | None) -> bool:
    width = q.shape[-1]
    return q.dtype in (torch.bfloat16, torch.float16) and mask_TN is None and width <= 256 and width % 8 == 0
