"""Small random models of every family, and the conventional run that their exact gradients are compared with."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from longstraw.ops.delta_rule import gated_delta_rule_naive

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


# Weights of std 0.02 would give flat logits and hide faults. The hybrid models amplify float32 rounding: at 0.3,
# scaling every parameter by 1 +- 1e-7 moves the stock model's own gradients by up to 2e-3, at 0.2 by up to 5e-4.
WEIGHT_STD = {"qwen3_next": 0.2, "qwen3_5_text": 0.2, "qwen3_5_moe_text": 0.2}
STOCK_RULES = {
    module: module.torch_chunk_gated_delta_rule
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next)
}


def tiny_model(
    model_type: str, *, dtype: torch.dtype = torch.float32, adapter: bool = True, seed: int = 0, **settings: object
) -> nn.Module:
    """A random model with large weights, LoRA B not zero; eager attention."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**BASE, **SETTINGS.get(model_type, {}), **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=WEIGHT_STD.get(model_type, 0.3))
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.eval()


def random_ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(3, 99, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def full_logprobs(model: nn.Module, prompt: Tensor, response: Tensor, temperature: float = 1.0) -> Tensor:
    """Logprobs of the response's tokens by the stock model on the whole sequence, with autograd."""
    device = next(model.parameters()).device
    ids = torch.cat([prompt, response]).to(device)
    with float64_recurrence():
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, response.to(device)[:, None])[:, 0]


def float64_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token in float64. The stock one is float32 and off by up to 4e-4 in gradients."""
    out, state = gated_delta_rule_naive(
        q.double(),
        k.double(),
        v_BTHV=v.double(),
        log_decay_BTH=g.double(),
        beta_BTH=beta.double(),
        initial_state_BHKV=None,
    )
    return out.to(v.dtype), state.float()


@contextmanager
def float64_recurrence() -> Iterator[None]:
    """The stock models with `float64_rule`, where nothing else replaced their own."""
    replaced = [m for m, stock in STOCK_RULES.items() if m.torch_chunk_gated_delta_rule is stock]
    try:
        for module in replaced:
            module.torch_chunk_gated_delta_rule = float64_rule
        yield
    finally:
        for module in replaced:
            module.torch_chunk_gated_delta_rule = STOCK_RULES[module]


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
    """The largest relative error over tensors, and its tensor; a missing or surplus one counts as 1."""
    worst = (0.0, "")
    for name in sorted(set(got) | set(want)):
        zero = torch.zeros_like(got[name] if name in got else want[name])
        a, b = got.get(name, zero).double(), want.get(name, zero).double()
        scale = float(b.norm())
        error = float((a - b).norm()) / scale if scale > 1e-9 else float((a - b).norm() > 1e-7)
        worst = max(worst, (error, name))
    return worst


class StoppedOracle:
    """The stock model with everything that passes from prompt to response positions detached.

    Within the context the model's attention detaches the keys and values of the first `num_prompt_tokens` positions,
    its DeltaNet layers detach their convolution's and recurrence's inputs there, and the prompt's last hidden state
    is detached.
    """

    def __init__(self, model: nn.Module, num_prompt_tokens: int) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config, self.norm, self.cut = base.config, base.model.norm, num_prompt_tokens
        self.module = sys.modules[type(base).__module__]

    def _detached(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim]
        return torch.cat([x.narrow(dim, 0, self.cut).detach(), x.narrow(dim, self.cut, size - self.cut)], dim)

    def __enter__(self) -> None:
        eager = self.module.eager_attention_forward
        ALL_ATTENTION_FUNCTIONS.register(
            "stopped_oracle",
            lambda m, q, k, v, mask, **kw: eager(m, q, self._detached(k, 2), self._detached(v, 2), mask, **kw),
        )
        ALL_MASK_ATTENTION_FUNCTIONS.register("stopped_oracle", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        self.config._attn_implementation = "stopped_oracle"
        self.handle = self.norm.register_forward_pre_hook(lambda _, args: (self._detached(args[0], 1),))
        self.stock = {
            name: getattr(self.module, name)
            for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
            if hasattr(self.module, name)
        }
        if self.stock:
            conv = self.stock["causal_conv1d_fn"]

            def stopped_rule(q, k, v, g, beta, **kw):
                q, k, v, g, beta = (self._detached(x, 1) for x in (q, k, v, g, beta))
                return float64_rule(q, k, v, g=g, beta=beta, **kw)

            self.module.torch_chunk_gated_delta_rule = stopped_rule
            self.module.causal_conv1d_fn = lambda x, *args, **kw: conv(self._detached(x, 2), *args, **kw)

    def __exit__(self, *_: object) -> None:
        self.config._attn_implementation = "eager"
        self.handle.remove()
        for name, function in self.stock.items():
            setattr(self.module, name, function)
