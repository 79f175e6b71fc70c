"""Small random models of every family, and the conventional run that their exact gradients are compared with."""

from collections.abc import Callable, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

BASE = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=512,
)
DELTA = dict(
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
WINDOWED = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=12)
SETTINGS: dict[str, dict] = {
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
}


def tiny_model(
    model_type: str, *, dtype: torch.dtype = torch.float32, adapter: bool = True, seed: int = 0, **settings: object
) -> nn.Module:
    """A random model with weights of std 0.3 (0.02 would hide faults), LoRA B not zero; eager attention."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**BASE, **SETTINGS.get(model_type, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.eval()


def random_ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(3, 99, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def full_logprobs(model: nn.Module, prompt: Tensor, response: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs of the response's tokens by the stock model on the whole sequence, with autograd."""
    device = next(model.parameters()).device
    ids = torch.cat([prompt, response]).to(device)
    logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, response.to(device)[:, None])[:, 0]


def full_gradients(
    model: nn.Module, prompt: Tensor, responses: Sequence[Tensor], loss: Callable[[list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Gradients of a loss of the responses' logprobs by ordinary full-sequence autograd."""
    model.zero_grad()
    loss([full_logprobs(model, prompt, response) for response in responses]).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error over tensors, and its tensor; one that is missing or should not be there counts as 1."""
    worst = (0.0, "")
    for name in sorted(set(got) | set(want)):
        zero = torch.zeros_like(got[name] if name in got else want[name])
        a, b = got.get(name, zero).double(), want.get(name, zero).double()
        scale = float(b.norm())
        error = float((a - b).norm()) / scale if scale > 1e-9 else float((a - b).norm() > 1e-7)
        worst = max(worst, (error, name))
    return worst
