"""The gated delta rule over a chunk of tokens, and the depthwise causal convolution in front of it.

Apart from the models because it is mathematics only: exact, differentiable in everything including the state it starts
from and the state it leaves, and beside each fast path the naive oracle it is tested against. The recurrence, for each
value head with state S (a map from keys to values) and unit keys k, queries q scaled by K ** -0.5:

    delta_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t),   S_t = exp(g_t) S_{t-1} + k_t delta_t',   out_t = S_t' q_t

Within a block all deltas solve one triangular system (the WY form), so only the state passes from block to block.
Sources: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3; Yang et al. 2025,
"Gated delta networks", section 3.3; the backward pass is derived here.

Shape suffixes: B batch, T tokens, H value heads, J key heads, G = H / J, K key width, V value width, N blocks,
C tokens of a block, M = B * H, P = 2 (keys, queries), D = P * C rows, keys above queries; W taps of the convolution,
w = W - 1, and there C is channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.errors import InputError

BLOCK_TOKENS = 64
BLOCKS_IN_FLIGHT = 64  # head-blocks whose intermediates are alive at a time: bounds memory, keeps them in cache
NORM_EPSILON = 1e-6
LOWEST_LOG_DECAY = -60.0  # 1e-26 stands for everything below: tiny results, and exp of less, are many times slower
SMALLEST_BETA = 1e-14  # backward divides by its square, without underflow; far below what matters next to 1
CONV_ELEMENTS = 1 << 17  # elements of one convolution slice, so that its passes stay in cache

_Cut = tuple[int, int, int]  # first token, number of blocks, tokens of each block


def gated_delta_rule(
    q_BTJK: Tensor,
    k_BTJK: Tensor,
    *,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    initial_state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above for any T >= 1: outputs [B, T, H, V] in v's dtype and the final state [B, H, K, V].

    q and k are l2-normalised inside; log decays are <= 0, beta >= 0. No initial state means zeros. Computed in float64
    if q is float64, else in float32, and the final state stays in that dtype. Gradients (first order) reach every
    argument, from the outputs and from the final state. Until backward it keeps, besides the arguments, one state per
    block and one value-sized tensor. Raises `InputError` if H is no multiple of J.
    """
    num_key_heads, num_value_heads = k_BTJK.shape[2], v_BTHV.shape[2]
    if num_value_heads % num_key_heads:
        raise InputError(
            f"delta rule: {num_value_heads} value heads are not a multiple of {num_key_heads} key heads; "
            "every key head must serve the same number of value heads."
        )
    inputs = (q_BTJK, k_BTJK, v_BTHV, log_decay_BTH, beta_BTH, initial_state_BHKV)
    if q_BTJK.shape[1] == 1:
        return _one_token(*inputs)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if keep:
        out_BTHV, final_BHKV = _GatedDeltaRule.apply(*inputs)  # type: ignore[no-untyped-call]
        return out_BTHV, final_BHKV
    out_BTHV, final_BHKV, _ = _forward(*inputs, keep=False)
    return out_BTHV, final_BHKV


def gated_delta_rule_naive(
    q_BTJK: Tensor,
    k_BTJK: Tensor,
    *,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    initial_state_BHKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Oracle of `gated_delta_rule`: one token after the other, ordinary autograd."""
    dtype = _compute_dtype(q_BTJK)
    group = v_BTHV.shape[2] // k_BTJK.shape[2]
    q_BTHK, k_BTHK = (_unit(x.to(dtype)).repeat_interleave(group, 2) for x in (q_BTJK, k_BTJK))
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    state_BHKV = _initial_state(initial_state_BHKV, k_BTHK[:, 0], v_BTHV[:, 0])
    outs = []
    for t in range(v_BTHV.shape[1]):
        state_BHKV = state_BHKV * log_decay_BTH[:, t, :, None, None].to(dtype).exp()
        predicted_BHV = (state_BHKV * k_BTHK[:, t, :, :, None]).sum(2)
        delta_BHV = beta_BTH[:, t, :, None].to(dtype) * (v_BTHV[:, t].to(dtype) - predicted_BHV)
        state_BHKV = state_BHKV + k_BTHK[:, t, :, :, None] * delta_BHV[:, :, None]
        outs.append((state_BHKV * q_BTHK[:, t, :, :, None]).sum(2))
    return torch.stack(outs, 1).to(v_BTHV.dtype), state_BHKV


def causal_conv(
    x_BCT: Tensor, weight_CW: Tensor, *, bias_C: Tensor | None, tail_BCw: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution without activation: outputs [B, C, T] in x's dtype, and the new tail [B, C, w].

    `tail_BCw` is what came before x (zeros if None); the new tail is the last w columns of both, a tensor of its own.
    Sums run in float32 (float64 for float64) and are rounded once. Fastest when x is a transposed view of [B, T, C].
    Gradients (first order) reach x, weight, bias and tail, from the outputs and from the new tail.
    """
    out_BTC, new_tail_BwC = _CausalConv.apply(  # type: ignore[no-untyped-call]
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


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def _initial_state(state_BHKV: Tensor | None, k_BHK: Tensor, v_BHV: Tensor) -> Tensor:
    if state_BHKV is not None:
        return state_BHKV.to(_compute_dtype(k_BHK))
    batch, num_heads, value_width = v_BHV.shape
    return k_BHK.new_zeros(batch, num_heads, k_BHK.shape[-1], value_width, dtype=_compute_dtype(k_BHK))


def _one_token(
    q_B1JK: Tensor, k_B1JK: Tensor, v_B1HV: Tensor, log_decay_B1H: Tensor, beta_B1H: Tensor, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The recurrence for T = 1 under ordinary autograd: the state is read once and written once."""
    dtype = _compute_dtype(q_B1JK)
    num_heads = v_B1HV.shape[2]
    kq_BJPK = _unit(torch.stack([k_B1JK[:, 0], q_B1JK[:, 0]], 2).to(dtype))
    k_BHK, q_BHK = kq_BJPK.repeat_interleave(num_heads // kq_BJPK.shape[1], 1).unbind(2)
    q_BHK = q_BHK * q_BHK.shape[-1] ** -0.5
    decay_BH1 = log_decay_B1H[:, 0, :, None].to(dtype).exp()
    state_BHKV = _initial_state(state_BHKV, k_BHK, v_B1HV[:, 0])
    reads_BHPV = torch.stack([k_BHK, q_BHK], 2) @ state_BHKV
    delta_BHV = beta_B1H[:, 0, :, None].to(dtype) * (v_B1HV[:, 0].to(dtype) - decay_BH1 * reads_BHPV[:, :, 0])
    out_BHV = decay_BH1 * reads_BHPV[:, :, 1] + (q_BHK * k_BHK).sum(-1, keepdim=True) * delta_BHV
    final_BHKV = torch.addcmul(state_BHKV * decay_BH1[..., None], k_BHK[..., None], delta_BHV[:, :, None])
    return out_BHV[:, None].to(v_B1HV.dtype), final_BHKV


def _cuts(num_tokens: int, num_heads: int) -> list[_Cut]:
    """Segments of whole blocks, and what is left over as one shorter block: nothing is ever padded."""
    num_blocks, rest = divmod(num_tokens, BLOCK_TOKENS)
    step = max(1, BLOCKS_IN_FLIGHT // num_heads)
    cuts = [(n * BLOCK_TOKENS, min(step, num_blocks - n), BLOCK_TOKENS) for n in range(0, num_blocks, step)]
    return cuts + [(num_blocks * BLOCK_TOKENS, 1, rest)] * (rest > 0)


def _cut_view(x_BTHX: Tensor, cut: _Cut) -> Tensor:
    """The tokens of a cut as a view [N, B, H, C, X]."""
    start, num_blocks, tokens = cut
    return x_BTHX[:, start : start + num_blocks * tokens].unflatten(1, (num_blocks, tokens)).permute(1, 0, 3, 2, 4)


def _blocks(x_BTHX: Tensor, cut: _Cut, dtype: torch.dtype) -> Tensor:
    """The tokens of a cut, contiguous [N, B, H, C, X]: cast and reordered in one pass."""
    view = _cut_view(x_BTHX, cut)
    return torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view)


@dataclass(frozen=True, eq=False)
class _Segment:
    """What the blocks of one segment need apart from values and state; made in forward and again in backward."""

    kq_NBJPCK: Tensor  # unit keys; unit queries times K ** -0.5
    norm_NBJPC1: Tensor  # what the raw keys and queries were multiplied by
    products_NBJPCC: Tensor  # keys and queries with the block's keys
    decay_NBJGCC: Tensor  # from token j to token i, zero for j > i
    attention_NMCC: Tensor  # query products, decayed
    solve_NMCC: Tensor  # (1 / beta + strictly lower decayed key products) ** -1
    early_kq_NMDK: Tensor  # decayed since the block's beginning: what reads the state
    late_k_NMCK: Tensor  # to be decayed until the block's end: what writes the state
    start_decay_NBJGC: Tensor
    end_decay_NBJGC: Tensor
    block_decay_NM11: Tensor
    beta_NBHC: Tensor


def _segment(q_BTJK: Tensor, k_BTJK: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, cut: _Cut) -> _Segment:
    dtype = _compute_dtype(q_BTJK)
    num_key_heads, group = k_BTJK.shape[2], beta_BTH.shape[2] // k_BTJK.shape[2]
    views = [_cut_view(x, cut) for x in (k_BTJK, q_BTJK)]
    kq_NBJPCK = torch.empty(*views[0].shape[:3], 2, *views[0].shape[3:], dtype=dtype, device=q_BTJK.device)
    for row, view in enumerate(views):
        kq_NBJPCK[:, :, :, row].copy_(view)
    norm_NBJPC1 = (kq_NBJPCK.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt_()
    norm_NBJPC1[:, :, :, 1] *= q_BTJK.shape[-1] ** -0.5
    kq_NBJPCK *= norm_NBJPC1
    products_NBJPCC = kq_NBJPCK @ kq_NBJPCK[:, :, :, :1].mT

    # Sums of log decays reach thousands where single steps matter: float64 keeps their differences exact. What lies
    # above the diagonal is clamped before exp, so that no infinity ever meets a zero.
    log_NBHC = _blocks(log_decay_BTH.unsqueeze(-1), cut, torch.float64).squeeze(-1).cumsum(-1)
    pairs_NBHCC = (log_NBHC.unsqueeze(-1) - log_NBHC.unsqueeze(-2)).to(dtype)
    decay_NBHCC = pairs_NBHCC.clamp_(LOWEST_LOG_DECAY, 0).exp_().tril_()
    decay_NBJGCC = decay_NBHCC.unflatten(2, (num_key_heads, group))
    start_NBJGC, end_NBJGC = (
        x.clamp(min=LOWEST_LOG_DECAY).exp().to(dtype).unflatten(2, (num_key_heads, group))
        for x in (log_NBHC, log_NBHC[..., -1:] - log_NBHC)
    )

    beta_NBHC = _blocks(beta_BTH.unsqueeze(-1), cut, dtype).squeeze(-1).clamp_(min=SMALLEST_BETA)
    beta_NBJGC = beta_NBHC.unflatten(2, (num_key_heads, group))
    system_NBJGCC = (products_NBJPCC[:, :, :, None, 0] * decay_NBJGCC).mul_(beta_NBJGC.unsqueeze(-1))
    solve_NBJGCC = torch.linalg.solve_triangular(
        system_NBJGCC, torch.diag_embed(beta_NBJGC), upper=False, unitriangular=True
    )
    kq_NBJ1PCK = kq_NBJPCK.unsqueeze(3)
    early_NBJGPCK = kq_NBJ1PCK * start_NBJGC[:, :, :, :, None, :, None]
    late_NBJGCK = kq_NBJ1PCK[:, :, :, :, 0] * end_NBJGC.unsqueeze(-1)
    return _Segment(
        kq_NBJPCK=kq_NBJPCK,
        norm_NBJPC1=norm_NBJPC1,
        products_NBJPCC=products_NBJPCC,
        decay_NBJGCC=decay_NBJGCC,
        attention_NMCC=(products_NBJPCC[:, :, :, None, 1] * decay_NBJGCC).flatten(1, 3),
        solve_NMCC=solve_NBJGCC.flatten(1, 3),
        early_kq_NMDK=early_NBJGPCK.flatten(4, 5).flatten(1, 3),
        late_k_NMCK=late_NBJGCK.flatten(1, 3),
        start_decay_NBJGC=start_NBJGC,
        end_decay_NBJGC=end_NBJGC,
        block_decay_NM11=start_NBJGC[..., -1].flatten(1)[..., None, None],
        beta_NBHC=beta_NBHC,
    )


def _forward(
    q_BTJK: Tensor,
    k_BTJK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    initial_state_BHKV: Tensor | None,
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, final state and, if kept, states [N + 1, M, K, V] and deltas [N, M, C, V] of each segment in turn."""
    dtype, num_heads = _compute_dtype(q_BTJK), v_BTHV.shape[2]
    out_BTHV = torch.empty(v_BTHV.shape, dtype=v_BTHV.dtype, device=v_BTHV.device)
    state_MKV = _initial_state(initial_state_BHKV, k_BTJK[:, 0], v_BTHV[:, 0]).flatten(0, 1)
    kept: list[Tensor] = []
    for cut in _cuts(v_BTHV.shape[1], state_MKV.shape[0]):
        segment, tokens = _segment(q_BTJK, k_BTJK, log_decay_BTH, beta_BTH, cut), cut[2]
        v_NMCV = _blocks(v_BTHV, cut, dtype).flatten(1, 2)
        reads_NMDV = v_NMCV.new_empty(*v_NMCV.shape[:2], 2 * tokens, v_NMCV.shape[3])
        deltas_NMCV = torch.empty_like(v_NMCV)
        states_NMKV = v_NMCV.new_empty(cut[1] + 1, *state_MKV.shape)
        states_NMKV[0] = state_MKV
        factors = (segment.early_kq_NMDK, segment.solve_NMCC, segment.late_k_NMCK.mT, segment.block_decay_NM11)
        moving = (v_NMCV, reads_NMDV, deltas_NMCV, states_NMKV[:-1], states_NMKV[1:])
        for early, solve, late, decay, v, reads, delta, before, after in zip(*factors, *moving, strict=True):
            torch.bmm(early, before, out=reads)
            torch.bmm(solve, v - reads[:, :tokens], out=delta)
            torch.mul(before, decay, out=after).baddbmm_(late, delta)
        outs_NMCV = (segment.attention_NMCC @ deltas_NMCV).add_(reads_NMDV[:, :, tokens:])
        _cut_view(out_BTHV, cut).copy_(outs_NMCV.unflatten(1, (-1, num_heads)))
        state_MKV = states_NMKV[-1]
        kept += [states_NMKV, deltas_NMCV] if keep else []
    return out_BTHV, state_MKV.unflatten(0, (-1, num_heads)).clone(), kept


class _GatedDeltaRule(torch.autograd.Function):
    """Keeps the arguments, the states between blocks and the deltas; everything else is made again in backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out_BTHV, final_BHKV, kept = _forward(*inputs, keep=True)
        ctx.save_for_backward(*inputs[:5], *kept)
        ctx.state_dtype = None if inputs[5] is None else inputs[5].dtype
        return out_BTHV, final_BHKV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BTHV: Tensor, d_final_BHKV: Tensor) -> tuple[Tensor | None, ...]:
        q_BTJK, k_BTJK, v_BTHV, log_decay_BTH, beta_BTH, *kept = ctx.saved_tensors
        num_heads, d_state_MKV = v_BTHV.shape[2], d_final_BHKV.flatten(0, 1)
        d_inputs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in ctx.saved_tensors[:5]]
        cuts = _cuts(v_BTHV.shape[1], d_state_MKV.shape[0])
        for cut, states_NMKV, deltas_NMCV in reversed(list(zip(cuts, kept[::2], kept[1::2], strict=True))):
            segment = _segment(q_BTJK, k_BTJK, log_decay_BTH, beta_BTH, cut)
            d_reads_NMDV = deltas_NMCV.new_empty(*deltas_NMCV.shape[:2], 2 * cut[2], deltas_NMCV.shape[3])
            d_reads_NMDV[:, :, cut[2] :].unflatten(1, (-1, num_heads)).copy_(_cut_view(d_out_BTHV, cut))
            d_states_NMKV = torch.empty_like(states_NMKV)
            d_states_NMKV[-1] = d_state_MKV
            _recur_back(segment, d_reads_NMDV, d_states_NMKV=d_states_NMKV)
            d_state_MKV = d_states_NMKV[0]
            parts = _gradients(
                segment,
                states_NMKV[:-1],
                deltas_NMCV=deltas_NMCV,
                d_reads_NMDV=d_reads_NMDV,
                d_ends_NMKV=d_states_NMKV[1:],
            )
            for whole, part_NBHCX in zip(d_inputs, parts, strict=True):
                _cut_view(whole if whole.dim() == 4 else whole.unsqueeze(-1), cut).copy_(part_NBHCX)
        dtype = ctx.state_dtype
        return *d_inputs, None if dtype is None else d_state_MKV.unflatten(0, (-1, num_heads)).to(dtype)


def _recur_back(segment: _Segment, d_reads_NMDV: Tensor, *, d_states_NMKV: Tensor) -> None:
    """Fill the upper half of `d_reads` (its lower half is the cotangent of the outputs) with the cotangents of the
    values, and `d_states` from its last state down to the first. Values have subtracted from them what keys read, so
    the upper half is minus the cotangent of what keys read; `_gradients` turns the sign."""
    tokens = segment.beta_NBHC.shape[-1]
    d_v_NMCV, d_out_NMCV = d_reads_NMDV.split(tokens, 2)
    d_deltas_NMCV = segment.attention_NMCC.mT @ d_out_NMCV
    early_k_NMKC, early_q_NMKC = segment.early_kq_NMDK.mT.split(tokens, 3)
    factors = (segment.late_k_NMCK, segment.solve_NMCC.mT, segment.block_decay_NM11, early_k_NMKC, early_q_NMKC)
    moving = (d_deltas_NMCV, d_v_NMCV, d_out_NMCV, d_states_NMKV[:-1], d_states_NMKV[1:])
    blocks = reversed(list(zip(*factors, *moving, strict=True)))
    for late, solve, decay, early_k, early_q, d_delta, d_v, d_out, d_before, d_after in blocks:
        torch.bmm(solve, d_delta.baddbmm_(late, d_after), out=d_v)
        torch.mul(d_after, decay, out=d_before).baddbmm_(early_k, d_v, alpha=-1).baddbmm_(early_q, d_out)


def _gradients(
    segment: _Segment, states_NMKV: Tensor, *, deltas_NMCV: Tensor, d_reads_NMDV: Tensor, d_ends_NMKV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of raw q and k [N, B, J, C, K], v [N, B, H, C, V], log decays and betas [N, B, H, C, 1]."""
    tokens, heads = deltas_NMCV.shape[2], segment.decay_NBJGCC.shape[2:4]

    def per_head(x_NMDX: Tensor, *rows: int) -> Tensor:
        return x_NMDX.unflatten(2, rows or (tokens,)).unflatten(1, (-1, *heads))

    d_early_NBJGPCK = per_head(d_reads_NMDV @ states_NMKV.mT, 2, tokens)
    d_early_NBJGPCK *= segment.start_decay_NBJGC[:, :, :, :, None, :, None]
    d_late_NBJGCK = per_head(deltas_NMCV @ d_ends_NMKV.mT).mul_(segment.end_decay_NBJGC.unsqueeze(-1))
    d_products_NBJGPCC = per_head(d_reads_NMDV @ deltas_NMCV.mT, 2, tokens).mul_(segment.decay_NBJGCC.unsqueeze(4))

    # A log decay gains from every product it decays. The diagonal is not decayed, and is left out exactly rather than
    # cancelled, so that the gradient of a strong decay is as accurate as it is small.
    kq_NBJ1PCK, products_NBJ1PCC = segment.kq_NBJPCK.unsqueeze(3), segment.products_NBJPCC.unsqueeze(3)
    read_NBJGPC = (d_early_NBJGPCK * kq_NBJ1PCK).sum(-1)
    written_NBJGC = (d_late_NBJGCK * kq_NBJ1PCK[:, :, :, :, 0]).sum(-1)
    carried_NM11 = d_ends_NMKV.flatten(2).unsqueeze(2) @ states_NMKV.flatten(2).unsqueeze(3) * segment.block_decay_NM11
    within_NBJGCC = d_products_NBJGPCC[:, :, :, :, 1] * products_NBJ1PCC[:, :, :, :, 1]
    within_NBJGCC.addcmul_(d_products_NBJGPCC[:, :, :, :, 0], products_NBJ1PCC[:, :, :, :, 0], value=-1)
    within_NBJGCC.diagonal(dim1=-2, dim2=-1).zero_()
    d_log_NBJGC = within_NBJGCC.sum(-1) - within_NBJGCC.sum(-2)
    d_log_NBJGC += read_NBJGPC[:, :, :, :, 1] - read_NBJGPC[:, :, :, :, 0] - written_NBJGC
    d_log_NBJGC[..., -1] += written_NBJGC.sum(-1) + carried_NM11.flatten(1).unflatten(1, (-1, *heads))
    d_log_NBHC = d_log_NBJGC.flatten(2, 3).flip(-1).cumsum(-1).flip(-1)

    d_products_NBJPCC = d_products_NBJGPCC.sum(3)
    d_products_NBJPCC[:, :, :, 0].neg_().diagonal(dim1=-2, dim2=-1).zero_()
    d_kq_NBJPCK = d_early_NBJGPCK.sum(3)
    d_kq_NBJPCK[:, :, :, 0].neg_().add_(d_late_NBJGCK.sum(3))
    d_products_NBJDC, kq_NBJDK = d_products_NBJPCC.flatten(3, 4), segment.kq_NBJPCK.flatten(3, 4)
    d_kq_NBJPCK += (d_products_NBJDC @ segment.kq_NBJPCK[:, :, :, 0]).unflatten(3, (2, tokens))
    d_kq_NBJPCK[:, :, :, 0] += d_products_NBJDC.mT @ kq_NBJDK
    along_NBJPC1 = (d_kq_NBJPCK * segment.kq_NBJPCK).sum(-1, keepdim=True)
    along_NBJPC1[:, :, :, 1] *= segment.kq_NBJPCK.shape[-1]  # the length of a scaled query is K ** -0.5, not 1
    d_k_NBJCK, d_q_NBJCK = (
        d_kq_NBJPCK.addcmul_(segment.kq_NBJPCK, along_NBJPC1, value=-1).mul_(segment.norm_NBJPC1).unbind(3)
    )

    d_v_NBHCV = d_reads_NMDV[:, :, :tokens].unflatten(1, (-1, heads.numel()))
    deltas_NBHCV = deltas_NMCV.unflatten(1, (-1, heads.numel()))
    d_beta_NBHC = (d_v_NBHCV * deltas_NBHCV).sum(-1) / segment.beta_NBHC.square()
    return d_q_NBJCK, d_k_NBJCK, d_v_NBHCV, d_log_NBHC.unsqueeze(-1), d_beta_NBHC.unsqueeze(-1)


class _CausalConv(torch.autograd.Function):
    """Shifted multiply-adds in [B, T, C] order, a slice of tokens at a time; keeps the arguments only."""

    @staticmethod
    def forward(
        ctx: Any, x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_BwC: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_tail = x_BTC.shape[1], weight_CW.shape[1] - 1
        taps_WC = weight_CW.to(_compute_dtype(x_BTC)).mT.contiguous()
        out_BTC = torch.empty(x_BTC.shape, dtype=x_BTC.dtype, device=x_BTC.device)
        for start, stop in _conv_slices(x_BTC):
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
        for start, stop in _conv_slices(x_BTC):
            padded_BSC = _padded(x_BTC, tail_BwC, start=start, stop=stop, num_tail=num_tail)
            d_sums_BSC = d_out_BTC[:, start:stop].to(taps_WC.dtype)
            d_bias_C += d_sums_BSC.sum((0, 1))
            for tap in range(num_tail + 1):
                d_padded_BSC[:, start + tap : stop + tap].addcmul_(d_sums_BSC, taps_WC[tap])
                d_taps_WC[tap] += (d_sums_BSC * padded_BSC[:, tap : tap + stop - start]).sum((0, 1))
        d_before_BwC, d_x_BTC = d_padded_BSC.split((num_tail, num_tokens), 1)
        d_bias = None if ctx.bias_dtype is None else d_bias_C.to(ctx.bias_dtype)
        d_tail = None if tail_BwC is None else d_before_BwC.to(tail_BwC.dtype)
        return d_x_BTC.to(x_BTC.dtype), d_taps_WC.mT.to(weight_CW.dtype), d_bias, d_tail


def _conv_slices(x_BTC: Tensor) -> list[tuple[int, int]]:
    batch, num_tokens, channels = x_BTC.shape
    step = max(1, CONV_ELEMENTS // (batch * channels))
    return [(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


def _padded(x_BTC: Tensor, tail_BwC: Tensor | None, *, start: int, stop: int, num_tail: int) -> Tensor:
    """Tokens start - w to stop in the dtype of the sums, from the tail or zero where they lie before x."""
    first = max(0, start - num_tail)
    missing = num_tail - (start - first)
    padded_BSC = x_BTC.new_empty(x_BTC.shape[0], num_tail + stop - start, x_BTC.shape[2], dtype=_compute_dtype(x_BTC))
    padded_BSC[:, missing:] = x_BTC[:, first:stop]
    padded_BSC[:, :missing] = 0 if tail_BwC is None else tail_BwC[:, num_tail - missing :]
    return padded_BSC
