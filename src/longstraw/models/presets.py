"""Configs of the two large models that LongStraw is built for, without weights: for planning and for counting.

Apart from loading because a preset cannot be loaded: it is the shape of a published model, not the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import AutoConfig, PretrainedConfig

from longstraw.errors import InputError
from longstraw.models.wording import nearest_hint


@dataclass(frozen=True)
class _Preset:
    model_type: str
    settings: dict[str, object]


_PRESETS = {
    "qwen3.6-27b": _Preset(
        "qwen3_5_text",
        dict(
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            max_position_embeddings=262144,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10]
            ),
        ),
    ),
    "glm-5.2": _Preset(
        "glm_moe_dsa",
        dict(
            vocab_size=154880,
            hidden_size=6144,
            intermediate_size=12288,
            num_hidden_layers=78,
            num_attention_heads=64,
            num_key_value_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=2048,
            index_topk_freq=4,
            first_k_dense_replace=3,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            max_position_embeddings=1048576,
            rope_parameters=dict(rope_type="default", rope_theta=8e6),
        ),
    ),
}


def preset_config(name: str) -> PretrainedConfig:
    """The config of a published architecture, to be changed at will: "qwen3.6-27b" or "glm-5.2".

    It has no weights: plan with it, or build it on the "meta" device. `max_position_embeddings` is the published one;
    set it higher for longer prompts. Raises `InputError` for another name.
    """
    if name not in _PRESETS:
        hint = nearest_hint(name, _PRESETS)
        raise InputError(f"preset_config: there is no preset {name!r}; there are {' and '.join(_PRESETS)}{hint}")
    preset = _PRESETS[name]
    # The config keeps the nested settings it is given; a caller's change must not reach the next caller.
    return AutoConfig.for_model(preset.model_type, **copy.deepcopy(preset.settings))
