"""Small models with random weights, one of every family: for tests, examples, and trying a setting out in seconds.

Apart from loading because there is nothing to read: the table below holds what makes each family small and still
exercises what is its own (windows, factors, index sharing, groups of experts).
"""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from longstraw.errors import InputError
from longstraw.models.adapters import LoraSettings, check_targets, with_adapter
from longstraw.models.families import FAMILIES
from longstraw.models.loading import torch_dtype
from longstraw.models.wording import nearest_hint

NUM_LAYERS = 4
BASE: dict[str, object] = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=512,
)
DELTA: dict[str, object] = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
)
EXPERTS: dict[str, object] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)
WINDOWED: dict[str, object] = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=12)
LATENT: dict[str, object] = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=16,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
# Four experts in each of two groups, one group allowed: both the group and the experts in it are a choice.
GROUPED: dict[str, object] = dict(n_routed_experts=8, n_group=2, topk_group=1)
# With fewer heads the index scores, sums of ReLUs, are often exactly 0 and tie at the cut.
INDEXED: dict[str, object] = dict(index_topk=16, index_n_heads=16, index_head_dim=16)

SETTINGS: dict[str, dict[str, object]] = {
    "mistral": dict(sliding_window=12),
    "mixtral": dict(sliding_window=12, num_local_experts=4),
    "phi3": dict(sliding_window=12),
    "starcoder2": dict(sliding_window=12),
    "qwen2": dict(use_sliding_window=True, **WINDOWED),
    "qwen3": dict(use_sliding_window=True, **WINDOWED),
    "qwen3_moe": dict(decoder_sparse_step=1, **EXPERTS),
    "qwen2_moe": dict(decoder_sparse_step=1, use_sliding_window=True, **WINDOWED, **EXPERTS),
    "smollm3": dict(use_sliding_window=True, **WINDOWED),
    "ministral": WINDOWED,
    "exaone4": WINDOWED,
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOWED),
    "seed_oss": dict(attention_dropout=0.0, residual_dropout=0.0),
    "helium": dict(head_dim=8),
    "granite": dict(embedding_multiplier=1.7, logits_scaling=1.3, residual_multiplier=0.8, attention_multiplier=0.3),
    "cohere": dict(logit_scale=0.6),
    "cohere2": dict(logit_scale=0.6, **WINDOWED),
    "olmo3": WINDOWED,
    "gemma3_text": dict(query_pre_attn_scalar=16, final_logit_softcapping=20.0, **WINDOWED),
    "qwen3_next": dict(decoder_sparse_step=1, **DELTA, **EXPERTS),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": dict(**DELTA, **EXPERTS),
    "deepseek_v3": dict(**LATENT, **GROUPED),
    "deepseek_v32": dict(**LATENT, **GROUPED, **INDEXED),
    "glm_moe_dsa": dict(n_routed_experts=4, indexer_types=["full", "shared", "shared", "full"], **LATENT, **INDEXED),
}
PER_LAYER = ("layer_types", "indexer_types")
# Settings that a config reads when it is made and turns into others, so that a made config does not show them.
READ_ONLY_ONCE = ("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "full_attention_interval")

# Weights of std 0.02 would give flat logits and hide faults. The hybrid models amplify float32 rounding: at 0.3,
# scaling every parameter by 1 +- 1e-7 moves the stock model's own gradients by up to 2e-3, at 0.2 by up to 5e-4.
DEFAULT_WEIGHT_STD = 0.3
WEIGHT_STD = {"qwen3_next": 0.2, "qwen3_5_text": 0.2, "qwen3_5_moe_text": 0.2}
ROUTER_BIAS = "e_score_correction_bias"


def tiny_model(
    model_type: str,
    *,
    dtype: str = "float32",
    adapter: LoraSettings | None = None,
    seed: int = 0,
    **settings: object,
) -> PreTrainedModel | PeftModel:
    """A model of a supported family with large random weights: 4 layers of width 32, 99 tokens, 512 positions.

    `dtype`: "float32", "bfloat16" or "float16". With `adapter` only the adapter requires grad, as from `load_model`;
    otherwise every parameter does. Equal arguments give equal weights; torch's generator is left as it was.
    `settings` are keys of the family's config that replace the small ones; patterns over layers are repeated to their
    number (`num_hidden_layers=8`). On the CPU, in eval mode.

    Raises `InputError` for a family, setting or dtype that does not exist, with the nearest name, and for an adapter
    that would train nothing.
    """
    if model_type not in FAMILIES:
        hint = nearest_hint(model_type, FAMILIES)
        raise InputError(f"tiny_model: model type {model_type!r} is not supported{hint}")
    _check_settings(model_type, settings)
    weight_dtype = torch_dtype(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = random_model(tiny_config(model_type, **settings), weight_dtype)
        if adapter is None:
            return model
        check_targets(model, adapter)
        return with_adapter(model, adapter).eval()


def tiny_config(model_type: str, **settings: object) -> PretrainedConfig:
    """The small config of a model type, of the library's own sizes where the table has none; `settings` win."""
    values = {**BASE, **SETTINGS.get(model_type, {}), **settings}
    num_layers = values["num_hidden_layers"]
    assert isinstance(num_layers, int), "the number of layers is a whole number"
    for key in PER_LAYER:
        pattern = values.get(key)
        if isinstance(pattern, list):
            values[key] = [pattern[layer % len(pattern)] for layer in range(num_layers)]
    if "qk_rope_head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]  # what the stock rotary embedding of latent attention reads
    return AutoConfig.for_model(model_type, **values)


def random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model with weights of std 0.2 or 0.3 drawn from torch's generator, biases of routers too; eager, eval mode."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    std = WEIGHT_STD.get(config.model_type, DEFAULT_WEIGHT_STD)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
    for name, buffer in model.named_buffers():
        if name.endswith(ROUTER_BIAS):
            nn.init.normal_(buffer, std=std)
    return model.eval()


def _check_settings(model_type: str, settings: dict[str, object]) -> None:
    config = AutoConfig.for_model(model_type)
    known = {*config.to_dict(), *config.attribute_map, *BASE, *READ_ONLY_ONCE}
    for name in settings:
        if name not in known:
            raise InputError(f"tiny_model: {model_type} has no setting {name!r}{nearest_hint(name, known)}")
