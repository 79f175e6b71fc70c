"""The depthwise causal convolution in front of the gated delta rule, as shifted multiply-adds.

Apart from the delta rule because it is another operation with another state (the last tokens it saw). The framework's
depthwise kernel is many times slower on a CPU, above all in backward, and keeps a padded copy of its input.

Shape suffixes: B batch, T tokens, C channels, W taps, w = W - 1 tokens of the tail, S = w + T tokens with the tail.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SLICE_ELEMENTS = 1 << 17  # elements of the slice worked on at a time, so that its passes stay in cache


def causal_conv(
    x_BCT: Tensor, weight_CW: Tensor, *, bias_C: Tensor | None, tail_BCw: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution without activation: outputs [B, C, T] in x's dtype, and the new tail [B, C, w].

    `tail_BCw` is what came before x (zeros if None); the new tail is the last w columns of both, a tensor of its own.
    Sums run in float32 (float64 for float64) and are rounded once. Fastest when x is a transposed view of [B, T, C].
    Gradients (first order) reach x, weight, bias and tail, from the outputs and from the new tail.
    """
    out_BTC, new_tail_BwC = _CausalConv.apply(
        x_BCT.transpose(1, 2), weight_CW, bias_C, None if tail_BCw is None else tail_BCw.transpose(1, 2)
    )
    return out_BTC.transpose(1, 2), new_tail_BwC.transpose(1, 2)


def causal_conv_naive(
    x_BCT: Tensor, weight_CW: Tensor, *, bias_C: Tensor | None, tail_BCw: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Oracle of `causal_conv`: the definition, token by token, ordinary autograd."""
    num_taps = weight_CW.shape[1]
    tail_BCw = x_BCT.new_zeros(*x_BCT.shape[:2], num_taps - 1) if tail_BCw is None else tail_BCw.to(x_BCT.dtype)
    dtype = _compute_dtype(x_BCT)
    padded_BCS = torch.cat([tail_BCw, x_BCT], 2)
    outs = []
    for t in range(x_BCT.shape[2]):
        out_BC = (padded_BCS[:, :, t : t + num_taps].to(dtype) * weight_CW.to(dtype)).sum(2)
        outs.append(out_BC if bias_C is None else out_BC + bias_C.to(dtype))
    return torch.stack(outs, 2).to(x_BCT.dtype), padded_BCS[:, :, x_BCT.shape[2] :]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _CausalConv(torch.autograd.Function):
    """Shifted multiply-adds in [B, T, C] order, a slice of tokens at a time; keeps the arguments only."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_BwC: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_tail = x_BTC.shape[1], weight_CW.shape[1] - 1
        taps_WC = weight_CW.to(_compute_dtype(x_BTC)).mT.contiguous()
        out_BTC = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
        for start, stop in _slices(x_BTC):
            padded_BSC = _padded(x_BTC, tail_BwC, start=start, stop=stop, num_tail=num_tail)
            sums_BSC = padded_BSC[:, : stop - start] * taps_WC[0]
            for tap in range(1, num_tail + 1):
                sums_BSC.addcmul_(padded_BSC[:, tap : tap + stop - start], taps_WC[tap])
            out_BTC[:, start:stop] = sums_BSC if bias_C is None else sums_BSC.add_(bias_C)
        ctx.save_for_backward(x_BTC, weight_CW, tail_BwC)
        ctx.bias_dtype = None if bias_C is None else bias_C.dtype
        tail_BwC = _padded(x_BTC, tail_BwC, start=num_tokens, stop=num_tokens, num_tail=num_tail)
        return out_BTC, tail_BwC.to(x_BTC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTC: Tensor, d_tail_BwC: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_CW, tail_BwC = ctx.saved_tensors
        num_tail, (batch, num_tokens, channels) = weight_CW.shape[1] - 1, x_BTC.shape
        taps_WC = weight_CW.to(_compute_dtype(x_BTC)).mT.contiguous()
        d_taps_WC, d_bias_C = torch.zeros_like(taps_WC), torch.zeros_like(taps_WC[0])
        d_padded_BSC = taps_WC.new_zeros(batch, num_tail + num_tokens, channels)
        d_padded_BSC[:, num_tokens:] = d_tail_BwC
        for start, stop in _slices(x_BTC):
            padded_BSC = _padded(x_BTC, tail_BwC, start=start, stop=stop, num_tail=num_tail)
            d_sums_BSC = d_out_BTC[:, start:stop].to(taps_WC.dtype)
            d_bias_C += d_sums_BSC.sum((0, 1))
            for tap in range(num_tail + 1):
                d_padded_BSC[:, start + tap : stop + tap].addcmul_(d_sums_BSC, taps_WC[tap])
                d_taps_WC[tap] += (d_sums_BSC * padded_BSC[:, tap : tap + stop - start]).sum((0, 1))
        d_before_BwC, d_x_BTC = d_padded_BSC.split((num_tail, num_tokens), 1)
        d_bias = None if ctx.bias_dtype is None else d_bias_C.to(ctx.bias_dtype)
        # A copy: a view would keep the whole chunk's gradient alive.
        d_tail = None if tail_BwC is None else d_before_BwC.to(tail_BwC.dtype, copy=True)
        return d_x_BTC.to(x_BTC.dtype), d_taps_WC.mT.to(weight_CW.dtype), d_bias, d_tail


def _slices(x_BTC: Tensor) -> list[tuple[int, int]]:
    batch, num_tokens, channels = x_BTC.shape
    step = max(1, SLICE_ELEMENTS // (batch * channels))
    return [(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


def _padded(x_BTC: Tensor, tail_BwC: Tensor | None, *, start: int, stop: int, num_tail: int) -> Tensor:
    """Tokens start - w to stop in the dtype of the sums, from the tail or zero where they lie before x."""
    first = max(0, start - num_tail)
    missing = num_tail - (start - first)
    padded_BSC = x_BTC.new_empty(x_BTC.shape[0], num_tail + stop - start, x_BTC.shape[2], dtype=_compute_dtype(x_BTC))
    padded_BSC[:, missing:] = x_BTC[:, first:stop]
    padded_BSC[:, :missing] = 0 if tail_BwC is None else tail_BwC[:, num_tail - missing :]
    return padded_BSC
