"""The small random models and the update that every method of the benchmark is given.

Shape suffixes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from longstraw.models.adapters import LoraSettings, with_adapter

Kind = Literal["hybrid", "dense", "latent"]

FIRST_WORD_ID = 3  # below: padding, begin and end of text


@dataclass(frozen=True)
class LatentSize:
    """What only the latent kind has. A head's keys and queries are `ModelSize.head_dim` wide, rotary part included."""

    indexers: str = "FSSF"  # repeated over the layers: F chooses positions, S shares the choice of the layer below
    topk: int = 512
    index_heads: int = 16  # with few heads many scores are exactly 0, and at the cut a tie is everybody's own choice
    index_width: int = 32
    query_rank: int = 128
    latent_width: int = 128
    rotary_width: int = 16
    num_experts: int = 8  # of which a token takes two, beside a shared one; the first layer is dense

    def indexer_types(self, num_layers: int) -> list[str]:
        names = {"F": "full", "S": "shared"}
        return [names[self.indexers[layer % len(self.indexers)]] for layer in range(num_layers)]


@dataclass(frozen=True)
class ModelSize:
    """Widths of a small model. The hybrid kind has one full-attention layer in four, the others are gated DeltaNet."""

    num_layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 768
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 4096
    max_positions: int = 1 << 20
    latent: LatentSize = LatentSize()


@dataclass(frozen=True, eq=False)
class Problem:
    """One group to learn from: advantages are given, the policy that sampled is the current one (ratio 1)."""

    prompt_P: Tensor  # int64, cpu
    responses: tuple[Tensor, ...]  # int64 [R], cpu
    advantages: tuple[float, ...]

    @property
    def num_response_tokens(self) -> int:
        return sum(response.numel() for response in self.responses)


def build_model(kind: Kind, size: ModelSize, *, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """A random bf16 model with stock sdpa attention and LoRA r=16 on all linear layers, float32 adapters (peft's way).

    The same arguments give the same weights. With `dtype` float32 the bf16 weights are widened, so both precisions are
    the same model. LoRA's B is random too, so that no gradient is zero by construction. Indexers have no adapter: what
    they choose is discrete.
    """
    torch.manual_seed(0)
    config = _config(kind, size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if kind == "latent":
        adapted = _with_adapter_beside_indexers(model)
    else:
        adapted = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        )
    return adapted.to(device=device, dtype=torch.float32 if dtype == torch.float32 else None)


def _config(kind: Kind, size: ModelSize) -> PretrainedConfig:
    common = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_heads if kind == "latent" else size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_positions,
        "initializer_range": size.hidden_size**-0.5,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rotary = {"rope_type": "default", "rope_theta": 1e7}
    if kind == "dense":
        return AutoConfig.for_model("qwen3", **common, rope_parameters=rotary)
    if kind == "latent":
        latent = size.latent
        return AutoConfig.for_model(
            "glm_moe_dsa",
            **common,
            rope_parameters=rotary,
            indexer_types=latent.indexer_types(size.num_layers),
            index_topk=latent.topk,
            index_n_heads=latent.index_heads,
            index_head_dim=latent.index_width,
            q_lora_rank=latent.query_rank,
            kv_lora_rank=latent.latent_width,
            qk_rope_head_dim=latent.rotary_width,
            qk_nope_head_dim=size.head_dim - latent.rotary_width,
            v_head_dim=size.head_dim,
            n_routed_experts=latent.num_experts,
            num_experts_per_tok=2,
            moe_intermediate_size=size.intermediate_size // 4,
            first_k_dense_replace=1,
        )
    pairs = size.head_dim // 8  # rotary frequencies: a quarter of the head is rotated
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return AutoConfig.for_model(
        "qwen3_5_text",
        **common,
        linear_num_key_heads=size.num_kv_heads,
        linear_num_value_heads=size.num_heads,
        linear_key_head_dim=size.head_dim,
        linear_value_head_dim=size.head_dim,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        rope_parameters={**rotary, "partial_rotary_factor": 0.25, "mrope_section": sections},
    )


def _with_adapter_beside_indexers(model: PreTrainedModel) -> PeftModel:
    """The adapter that `load_model` would fit, with peft's random B of `init_lora_weights=False`."""
    adapted = with_adapter(model, LoraSettings(r=16))
    for name, parameter in adapted.named_parameters():
        if ".lora_B." in name:
            nn.init.kaiming_uniform_(parameter, a=5**0.5)
    return adapted


def describe_latent(size: ModelSize) -> str:
    """What is the latent kind's own, in words."""
    latent = size.latent
    pattern = "".join(kind[0].upper() for kind in latent.indexer_types(size.num_layers))
    return (
        f"indexers {pattern} (F chooses, S shares), top {latent.topk} by {latent.index_heads} index heads of "
        f"{latent.index_width}, latent {latent.latent_width} + rotary {latent.rotary_width}, {latent.num_experts} "
        "experts of which a token takes 2 and a shared one"
    )


def build_problem(num_prompt_tokens: int, num_responses: int, vocab_size: int) -> Problem:
    """Random tokens; each response is 1/64 of the prompt. Advantages spread evenly from 1 to -1."""
    generator = torch.Generator().manual_seed(num_prompt_tokens)
    num_tokens = max(1, num_prompt_tokens // 64)

    def draw(count: int) -> Tensor:
        return torch.randint(FIRST_WORD_ID, vocab_size, (count,), generator=generator)

    prompt = draw(num_prompt_tokens)
    responses = tuple(draw(num_tokens) for _ in range(num_responses))
    return Problem(prompt, responses, tuple(torch.linspace(1, -1, num_responses).tolist()))


def adapter_gradients(model: PeftModel) -> dict[str, Tensor]:
    """Copies of the adapter gradients, float32 on the CPU."""
    named = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {name: gradient.detach().float().cpu().clone() for name, gradient in named if gradient is not None}
