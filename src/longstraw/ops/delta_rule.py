"""The gated delta rule over a chunk of tokens.

Apart from the models because it is mathematics only: exact, differentiable in everything including the state it starts
from and the state it leaves, and beside each fast path the naive oracle it is tested against. The recurrence, for each
value head with log decay g, state S [K, V], unit key k, and unit query q times K ** -0.5:

    delta_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t),   S_t = exp(g_t) S_{t-1} + k_t delta_t',   out_t = S_t' q_t

Within a block all deltas solve one triangular system (the WY form), so only the state passes from block to block.
Sources: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3; Yang et al. 2025,
"Gated delta networks", section 3.3; the backward pass is derived here.

Shape suffixes: B batch, T tokens, H value heads, J key heads, G = H / J, K key width, V value width, N blocks,
C tokens of a block, M = B * H, P = 2 (keys, queries), D = P * C rows, keys above queries.
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
        out_BTHV, final_BHKV = _GatedDeltaRule.apply(*inputs)
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

    # Sums of log decays reach thousands where single steps matter: float64 keeps their differences exact. Clamping
    # keeps exp on its fast path; above the diagonal tril then writes zeros, so no infinity ever meets a zero.
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
        if ctx.state_dtype is None:
            return *d_inputs, None
        # A copy: a view would keep the cotangents of a whole segment's states alive.
        return *d_inputs, d_state_MKV.unflatten(0, (-1, num_heads)).to(ctx.state_dtype, copy=True)


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

    # A log decay gains from every product that crosses its token: read at or after it, written before it. Summed as
    # such; differences of sums over all products would lose the digits of strong decays.
    kq_NBJ1PCK, products_NBJ1PCC = segment.kq_NBJPCK.unsqueeze(3), segment.products_NBJPCC.unsqueeze(3)
    within_NBJGCC = d_products_NBJGPCC[:, :, :, :, 1] * products_NBJ1PCC[:, :, :, :, 1]
    within_NBJGCC.addcmul_(d_products_NBJGPCC[:, :, :, :, 0], products_NBJ1PCC[:, :, :, :, 0], value=-1)
    d_log_NBJGC = (torch.ones_like(within_NBJGCC[0, 0, 0, 0]).triu_() @ within_NBJGCC).tril_(-1).sum(-1)
    read_k_NBJGC, read_q_NBJGC = (d_early_NBJGPCK * kq_NBJ1PCK).sum(-1).unbind(4)
    d_log_NBJGC += (read_q_NBJGC - read_k_NBJGC).flip(-1).cumsum(-1).flip(-1)
    written_NBJGC = (d_late_NBJGCK * kq_NBJ1PCK[:, :, :, :, 0]).sum(-1)
    d_log_NBJGC += written_NBJGC.cumsum(-1) - written_NBJGC
    carried_NM11 = d_ends_NMKV.flatten(2).unsqueeze(2) @ states_NMKV.flatten(2).unsqueeze(3) * segment.block_decay_NM11
    d_log_NBHC = d_log_NBJGC.flatten(2, 3) + carried_NM11.flatten(2).unflatten(1, (-1, heads.numel()))

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
