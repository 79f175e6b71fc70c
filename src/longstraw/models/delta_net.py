"""Gated DeltaNet layers of the hybrid families with the forward replaced: same weights and adapters, explicit state.

Apart from the decoder because the stock forward cannot be used for replay: library caches overwrite the state that
autograd saved, and its CPU fallback is several times slower. The replaced forward calls the module's own projections,
norm and output projection, so adapters on them keep working, and rounds where the stock one rounds; only convolution
and recurrence are `longstraw.ops`.

Shape suffixes: B batch, T tokens, E hidden size, C convolution channels, w convolution width - 1, H value heads,
J key heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from longstraw.errors import UnsupportedError
from longstraw.models.seam import replaced_forwards
from longstraw.ops.causal_conv import causal_conv
from longstraw.ops.delta_rule import gated_delta_rule

StockDeltaNet = Any  # the nn.Module of a family in `_PROJECTIONS`; the library declares no common type


class HeadExchange(Protocol):
    """How ranks that each have some tokens of all heads trade them for all tokens of some heads."""

    def to_heads(self, x_BTHD: Tensor) -> Tensor:
        """From this rank's tokens to this rank's heads, all tokens in position order; differentiable."""
        ...

    def to_tokens(self, x_BTHD: Tensor) -> Tensor:
        """The way back."""
        ...

    def own(self, x_H: Tensor) -> Tensor:
        """This rank's share of what is laid out by heads along the first dim."""
        ...


@dataclass(eq=False)
class RecurrentCache:
    """The one-layer cache of a DeltaNet layer: what earlier tokens left, and, once the layer ran, what these leave.

    None before the first token. The layer mutates neither `conv_tail` nor `matrix_state`; if they require grad, their
    gradients come from the outputs and from the new ones, which are tensors of their own, never views of larger ones.
    """

    conv_tail: Tensor | None  # [B, C, w], inputs of the convolution, model dtype
    matrix_state: Tensor | None  # float32 [B, H, K, V]
    new_conv_tail: Tensor | None = None
    new_matrix_state: Tensor | None = None
    heads: HeadExchange | None = None  # with it the tokens are a share of a chunk, and C and H are a share too


def delta_net_forward(module: StockDeltaNet, hidden_BTE: Tensor, *, cache: RecurrentCache | None) -> Tensor:
    """Outputs [B, T, E] of a stock gated DeltaNet module on consecutive unpadded tokens, T >= 1.

    Reads the state of earlier tokens from `cache` and puts the new one there; without a cache it starts from nothing.
    """
    before = RecurrentCache(None, None) if cache is None else cache
    mixed_BTC, gate_BTHV, b_BTH, a_BTH = _projections(module)(module, hidden_BTE)
    weights = _Weights(module.conv1d.weight.squeeze(1), module.conv1d.bias, module.A_log, module.dt_bias)
    heads, degree = before.heads, 1
    if heads is not None:
        mixed_BTC, b_BTH, a_BTH = _to_heads(module, heads, mixed_BTC, b_BTH, a_BTH)
        weights, degree = _own_weights(module, heads, weights), module.num_v_heads // b_BTH.shape[-1]
    conv_BCT, new_conv_tail = causal_conv(
        mixed_BTC.transpose(1, 2), weights.conv_Cw, bias_C=weights.conv_bias_C, tail_BCw=before.conv_tail
    )
    mixed_BTC = ACT2FN[module.activation](conv_BCT.transpose(1, 2))
    widths = [module.key_dim // degree, module.key_dim // degree, module.value_dim // degree]
    q_BTQ, k_BTQ, v_BTQ = mixed_BTC.split(widths, -1)
    out_BTHV, new_matrix_state = gated_delta_rule(
        q_BTQ.unflatten(-1, (-1, module.head_k_dim)),
        k_BTQ.unflatten(-1, (-1, module.head_k_dim)),
        v_BTHV=v_BTQ.unflatten(-1, (-1, module.head_v_dim)),
        # At least float32: in half precision exp of a log rate overflows.
        log_decay_BTH=-_wide(weights.a_log_H).exp() * functional.softplus(_wide(a_BTH) + weights.dt_bias_H),
        beta_BTH=b_BTH.sigmoid(),
        initial_state_BHKV=before.matrix_state,
    )
    if cache is not None:
        cache.new_conv_tail, cache.new_matrix_state = new_conv_tail, new_matrix_state
    if heads is not None:
        out_BTHV = heads.to_tokens(out_BTHV)
    normed = module.norm(out_BTHV.reshape(-1, module.head_v_dim), gate_BTHV.reshape(-1, module.head_v_dim))
    return module.out_proj(normed.view(*hidden_BTE.shape[:2], -1))


@dataclass(frozen=True, eq=False)
class _Weights:
    """What the recurrence multiplies by, of all heads or of a rank's."""

    conv_Cw: Tensor
    conv_bias_C: Tensor | None
    a_log_H: Tensor
    dt_bias_H: Tensor


def _to_heads(
    module: StockDeltaNet, heads: HeadExchange, mixed_BTC: Tensor, b_BTH: Tensor, a_BTH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution inputs, b and a of this rank's heads at all tokens, in one exchange: packed by key head."""
    num_key_heads, per_key_head = module.num_k_heads, module.num_v_heads // module.num_k_heads
    q, k, v = (x.unflatten(-1, (num_key_heads, -1)) for x in mixed_BTC.split(_channel_widths(module), -1))
    parts = [q, k, v, *(x.unflatten(-1, (num_key_heads, per_key_head)) for x in (b_BTH, a_BTH))]
    packed = heads.to_heads(torch.cat(parts, -1))
    q, k, v, b, a = (x.flatten(2) for x in packed.split([part.shape[-1] for part in parts], -1))
    return torch.cat([q, k, v], -1), b, a


def _own_weights(module: StockDeltaNet, heads: HeadExchange, weights: _Weights) -> _Weights:
    def channels(x_C: Tensor) -> Tensor:
        return torch.cat([heads.own(part) for part in x_C.split(_channel_widths(module))])

    bias = None if weights.conv_bias_C is None else channels(weights.conv_bias_C)
    return _Weights(channels(weights.conv_Cw), bias, heads.own(weights.a_log_H), heads.own(weights.dt_bias_H))


def _channel_widths(module: StockDeltaNet) -> list[int]:
    return [module.key_dim, module.key_dim, module.value_dim]


@contextmanager
def replaced_delta_nets(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within it the stock modules run `delta_net_forward` when their decoder layer calls them; on exit, as before.

    The layer's `cache` must be a `RecurrentCache` (or None) and its attention mask None. Raises `UnsupportedError`,
    before any module is touched, if one is not a gated DeltaNet of a supported family.
    """
    for module in modules:
        _projections(module)
    with replaced_forwards(modules, _called_by_layer):
        yield


def _called_by_layer(
    module: StockDeltaNet,
    hidden_states: Tensor,
    *,
    cache: object = None,
    attention_mask: Tensor | None = None,
    **_unused: object,  # what decoder layers hand to attention and DeltaNet alike
) -> Tensor:
    if attention_mask is not None:
        raise UnsupportedError("DeltaNet layer: padded rows are not supported; pass unpadded tokens and no mask.")
    if not (cache is None or isinstance(cache, RecurrentCache)):
        raise UnsupportedError(f"DeltaNet layer: the cache must be a RecurrentCache, got {type(cache).__name__}.")
    return delta_net_forward(module, hidden_states, cache=cache)


_Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # convolution input, gate, b, a


def _project_apart(module: StockDeltaNet, hidden_BTE: Tensor) -> _Projected:
    gate_BTHV = module.in_proj_z(hidden_BTE).unflatten(-1, (-1, module.head_v_dim))
    return module.in_proj_qkv(hidden_BTE), gate_BTHV, module.in_proj_b(hidden_BTE), module.in_proj_a(hidden_BTE)


def _project_interleaved(module: StockDeltaNet, hidden_BTE: Tensor) -> _Projected:
    q_BTJK, k_BTJK, v_BTHV, gate_BTHV, b_BTH, a_BTH = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden_BTE), module.in_proj_ba(hidden_BTE)
    )
    return torch.cat([x.flatten(2) for x in (q_BTJK, k_BTJK, v_BTHV)], -1), gate_BTHV, b_BTH, a_BTH


_PROJECTIONS: dict[str, Callable[[StockDeltaNet, Tensor], _Projected]] = {
    "Qwen3NextGatedDeltaNet": _project_interleaved,
    "Qwen3_5GatedDeltaNet": _project_apart,
    "Qwen3_5MoeGatedDeltaNet": _project_apart,
}


def _projections(module: StockDeltaNet) -> Callable[[StockDeltaNet, Tensor], _Projected]:
    name = type(module).__name__
    if name not in _PROJECTIONS:
        raise UnsupportedError(
            f"{name} is not a supported gated DeltaNet; supported are {', '.join(_PROJECTIONS)}: use such a model."
        )
    return _PROJECTIONS[name]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
