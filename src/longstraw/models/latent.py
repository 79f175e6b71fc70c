"""MLA layers of the latent families with the attention's forward replaced: same weights and adapters, absorbed.

Apart from the decoder because the stock forward cannot scale: it expands every latent of the path to keys and values of
every head, and with an indexer it builds a dense mask. The replaced forward maps queries into latent space instead, so
that a token's state stays one row [latent | rotated shared key] for all heads, and hands queries and rows to the seam.
It calls the module's own projections, norms and indexer sub-modules, so adapters on them keep working. `kv_b_proj` is
never called: its weight, with the active adapters' low-rank parts beside it (added to the weight they would be lost to
bf16 rounding), is applied per head from both sides.

Shape suffixes: B batch, T tokens, E hidden size, H heads, N width of a head without rotary part, R width of the rotary
part, L width of a latent, W = L + R, V value width, I index heads, D index width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_moe_dsa

from longstraw.errors import UnsupportedError
from longstraw.models.seam import replaced_forwards

StockModule = Any  # an nn.Module of the library, which declares no common type
Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class IndexProjections:
    """What an indexer makes of consecutive tokens: scores are `weight . relu(q . key)`. Without gradient."""

    q_BTID: Tensor
    weight_BTI: Tensor  # float32, with the factors of heads and width
    key_BTD: Tensor


class LatentSeam(Protocol):
    """What one layer's attention does with its projections."""

    def needs_index(self) -> bool:
        """Whether `attend` wants the indexer's projections: not where the choice is known, nor where none is made."""
        ...

    def attend(
        self, q_BHTW: Tensor, rows_BTW: Tensor, index: IndexProjections | None, *, scale: float, latent_width: int
    ) -> Tensor:
        """Weighted sums of latents `[B, H, T, L]`."""
        ...


@dataclass(frozen=True)
class _Conventions:
    """Where the families' attention modules differ."""

    rotate_interleaved: Rotate
    rotate_halves: Rotate | None  # where a config may ask for it, or the indexer uses it
    indexer_interleaved: bool
    num_outputs: int  # of the stock forward


_FAMILIES: dict[str, _Conventions] = {
    "DeepseekV3Attention": _Conventions(
        deepseek_v3.apply_rotary_pos_emb_interleave, deepseek_v3.apply_rotary_pos_emb, False, 2
    ),
    "DeepseekV32Attention": _Conventions(
        deepseek_v32.apply_rotary_pos_emb_interleave, deepseek_v32.apply_rotary_pos_emb, False, 2
    ),
    "GlmMoeDsaAttention": _Conventions(glm_moe_dsa.apply_rotary_pos_emb_interleave, None, True, 3),
}


def latent_attention_forward(
    module: StockModule, hidden_BTE: Tensor, *, rotary: tuple[Tensor, Tensor], seam: LatentSeam
) -> Tensor:
    """Outputs `[B, T, E]` of a stock MLA module on consecutive tokens; their state goes in and out through the seam."""
    conventions = _FAMILIES[type(module).__name__]
    q_resid, q_BTHD = _queries(module, hidden_BTE)
    q_pass, q_rot = q_BTHD.transpose(1, 2).split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    latent, k_rot = module.kv_a_proj_with_mqa(hidden_BTE).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    q_rot, k_rot = _rotate(module, conventions)(q_rot, k_rot[:, None], *rotary)
    rows_BTW = torch.cat([module.kv_a_layernorm(latent), k_rot[:, 0]], -1)
    up = HeadProjection(module.kv_b_proj, module.num_heads, module.qk_nope_head_dim)
    q_BHTW = torch.cat([up.absorb(q_pass), q_rot], -1)
    index = None
    if seam.needs_index():
        index = _index_projections(module.indexer, hidden_BTE, q_resid, rotary=rotary, conventions=conventions)
    out_BHTL = seam.attend(q_BHTW, rows_BTW, index, scale=module.scaling, latent_width=module.kv_lora_rank)
    return module.o_proj(up.expand(out_BHTL).transpose(1, 2).flatten(2))


class HeadProjection:
    """`kv_b_proj` read per head: key part `[H, N, L]`, value part `[H, V, L]`, and the low-rank parts of adapters.

    Gradients reach the weight and every active adapter's A and B. With adapters switched off only the weight acts.
    """

    def __init__(self, module: nn.Module, num_heads: int, key_width: int) -> None:
        self._key_width = key_width
        self._weight_HOL = _base_weight(module).unflatten(0, (num_heads, -1))  # O = N + V
        self._low_rank = [
            (a_RL, b_OR.unflatten(0, (num_heads, -1)), scale) for a_RL, b_OR, scale in _low_rank_parts(module)
        ]

    def absorb(self, q_BHTN: Tensor) -> Tensor:
        """Queries in latent space `[B, H, T, L]`: their product with a latent is that with the key made of it."""
        out = q_BHTN @ self._weight_HOL[:, : self._key_width]
        for a_RL, b_HOR, scale in self._low_rank:
            out = out + (q_BHTN.to(b_HOR.dtype) @ b_HOR[:, : self._key_width]) @ a_RL * scale
        return out.to(q_BHTN.dtype)

    def expand(self, out_BHTL: Tensor) -> Tensor:
        """Values `[B, H, T, V]` of weighted sums of latents."""
        out = out_BHTL @ self._weight_HOL[:, self._key_width :].mT
        for a_RL, b_HOR, scale in self._low_rank:
            out = out + (out_BHTL.to(a_RL.dtype) @ a_RL.mT) @ b_HOR[:, self._key_width :].mT * scale
        return out.to(out_BHTL.dtype)


def replaced_latent_attentions(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Within it the stock modules run `latent_attention_forward` when their decoder layer calls them with a seam."""
    return replaced_forwards(modules, _called_by_layer)


def refuse_unfit_projection(name: str, module: nn.Module) -> None:
    """Raise `UnsupportedError` unless `kv_b_proj`'s effect is a weight plus plain low-rank parts."""
    if isinstance(module, LoraLayer):
        if module.merged:
            raise UnsupportedError(f"{name}: its adapter is merged into the weight; call unmerge_adapter() first.")
        if module.lora_variant or any(module.lora_bias.values()):
            raise UnsupportedError(
                f"{name}: only plain LoRA is supported on kv_b_proj (no DoRA or other variant, no lora_bias), because "
                "MLA runs absorbed; use LoraSettings, or leave kv_b_proj out of target_modules."
            )
        module = module.get_base_layer()
    if type(module).__name__ not in ("Linear", "Linear4bit"):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__}; MLA runs absorbed and needs a linear layer, in 4 bits or not, with "
            "or without LoRA."
        )


def _called_by_layer(
    module: StockModule,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *,
    chunk: LatentSeam,
    **_unused: object,  # what decoder layers hand to every attention
) -> tuple[Tensor | None, ...]:
    out = latent_attention_forward(module, hidden_states, rotary=position_embeddings, seam=chunk)
    return (out, *[None] * (_FAMILIES[type(module).__name__].num_outputs - 1))


def _queries(module: StockModule, hidden_BTE: Tensor) -> tuple[Tensor | None, Tensor]:
    """The low-rank queries that the indexer reads, if there are any, and queries `[B, T, H, N + R]`."""
    if module.q_lora_rank is None:
        q_resid, q = None, module.q_proj(hidden_BTE)
    else:
        q_resid = module.q_a_layernorm(module.q_a_proj(hidden_BTE))
        q = module.q_b_proj(q_resid)
    return q_resid, q.unflatten(-1, (module.num_heads, -1))


def _rotate(module: StockModule, conventions: _Conventions) -> Rotate:
    if type(module).__name__ == "DeepseekV3Attention" and not module.config.rope_interleave:
        assert conventions.rotate_halves is not None, "DeepSeek-V3 has both"
        return conventions.rotate_halves
    return conventions.rotate_interleaved


@torch.no_grad()
def _index_projections(
    indexer: StockModule,
    hidden_BTE: Tensor,
    q_resid: Tensor | None,
    *,
    rotary: tuple[Tensor, Tensor],
    conventions: _Conventions,
) -> IndexProjections:
    """The stock indexer up to its scores, by its own sub-modules."""
    rotate = conventions.rotate_interleaved if conventions.indexer_interleaved else conventions.rotate_halves
    assert rotate is not None and q_resid is not None, "every indexer reads low-rank queries"
    widths = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q_rot, q_pass = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1)).split(widths, -1)
    k_rot, k_pass = indexer.k_norm(indexer.wk(hidden_BTE))[:, :, None].split(widths, -1)
    q_rot, k_rot = rotate(q_rot, k_rot, *rotary, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden_BTE.to(indexer.weights_proj.weight.dtype)).float()
    return IndexProjections(
        torch.cat([q_rot, q_pass], -1),
        weights * (indexer.n_heads**-0.5 * indexer.softmax_scale),
        torch.cat([k_rot, k_pass], -1)[:, :, 0],
    )


def _base_weight(module: nn.Module) -> Tensor:
    base: StockModule = module.get_base_layer() if isinstance(module, LoraLayer) else module
    if type(base).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(base.weight.data, base.weight.quant_state)
        return weight
    return base.weight


def _low_rank_parts(module: nn.Module) -> list[tuple[Tensor, Tensor, float]]:
    """A, B and scale of every active adapter."""
    if not isinstance(module, LoraLayer) or module.disable_adapters:
        return []
    return [
        (module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
        for name in module.active_adapters
        if name in module.lora_A
    ]
