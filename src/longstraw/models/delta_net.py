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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from longstraw.errors import UnsupportedError
from longstraw.models.seam import replaced_forwards
from longstraw.ops.causal_conv import causal_conv
from longstraw.ops.delta_rule import gated_delta_rule

StockDeltaNet = Any  # the nn.Module of a family in `_PROJECTIONS`; the library declares no common type


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


def delta_net_forward(module: StockDeltaNet, hidden_BTE: Tensor, *, cache: RecurrentCache | None) -> Tensor:
    """Outputs [B, T, E] of a stock gated DeltaNet module on consecutive unpadded tokens, T >= 1.

    Reads the state of earlier tokens from `cache` and puts the new one there; without a cache it starts from nothing.
    """
    before = RecurrentCache(None, None) if cache is None else cache
    mixed_BTC, gate_BTHV, b_BTH, a_BTH = _projections(module)(module, hidden_BTE)
    conv_BCT, new_conv_tail = causal_conv(
        mixed_BTC.transpose(1, 2),
        module.conv1d.weight.squeeze(1),
        bias_C=module.conv1d.bias,
        tail_BCw=before.conv_tail,
    )
    mixed_BTC = ACT2FN[module.activation](conv_BCT.transpose(1, 2))
    q_BTQ, k_BTQ, v_BTQ = mixed_BTC.split([module.key_dim, module.key_dim, module.value_dim], -1)
    out_BTHV, new_matrix_state = gated_delta_rule(
        q_BTQ.unflatten(-1, (-1, module.head_k_dim)),
        k_BTQ.unflatten(-1, (-1, module.head_k_dim)),
        v_BTHV=v_BTQ.unflatten(-1, (-1, module.head_v_dim)),
        # At least float32: in half precision exp of a log rate overflows.
        log_decay_BTH=-_wide(module.A_log).exp() * functional.softplus(_wide(a_BTH) + module.dt_bias),
        beta_BTH=b_BTH.sigmoid(),
        initial_state_BHKV=before.matrix_state,
    )
    if cache is not None:
        cache.new_conv_tail, cache.new_matrix_state = new_conv_tail, new_matrix_state
    normed = module.norm(out_BTHV.reshape(-1, module.head_v_dim), gate_BTHV.reshape(-1, module.head_v_dim))
    return module.out_proj(normed.view(*hidden_BTE.shape[:2], -1))


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
