"""The small random models and the update that every method of the benchmark is given.

Shape suffixes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Kind = Literal["hybrid", "dense"]

FIRST_WORD_ID = 3  # below: padding, begin and end of text


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
    the same model. LoRA's B is random too, so that no gradient is zero by construction.
    """
    torch.manual_seed(0)
    common = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.max_positions,
        "initializer_range": size.hidden_size**-0.5,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rotary = {"rope_type": "default", "rope_theta": 1e7}
    if kind == "hybrid":
        pairs = size.head_dim // 8  # rotary frequencies: a quarter of the head is rotated
        sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        config = AutoConfig.for_model(
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
    else:
        config = AutoConfig.for_model("qwen3", **common, rope_parameters=rotary)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, lora).to(device=device, dtype=torch.float32 if dtype == torch.float32 else None)


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
