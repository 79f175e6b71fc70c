"""Small random models of every family, and the conventional run that their exact gradients are compared with."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from longstraw.models.adapters import LoraSettings, with_adapter
from longstraw.models.families import FAMILIES
from longstraw.models.tiny import random_model, tiny_config
from longstraw.ops.delta_rule import gated_delta_rule_naive

WITH_EXPERTS = [
    "qwen3_moe",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "glm_moe_dsa",
]
STOCK_RULES = {
    module: module.torch_chunk_gated_delta_rule
    for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next)
}


def tiny_model(
    model_type: str, *, dtype: torch.dtype = torch.float32, adapter: bool = True, seed: int = 0, **settings: object
) -> nn.Module:
    """`longstraw.tiny_model` of any model type, supported or not, with an adapter whose B is not zero."""
    torch.manual_seed(seed)
    model = random_model(tiny_config(model_type, **settings), dtype)
    if adapter:
        is_latent = model_type in FAMILIES and FAMILIES[model_type].latent
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = adapted_with_experts(model) if is_latent else get_peft_model(model, lora)
    return model.eval()


def adapted_with_experts(model: nn.Module) -> nn.Module:
    """On every linear layer that gets a gradient and on the fused experts."""
    fused = ["experts.gate_up_proj", "experts.down_proj"]
    has_experts = any(name.endswith(fused[0]) for name, _ in model.named_parameters())
    model = with_adapter(model, LoraSettings(r=4, target_parameters=fused if has_experts else []))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


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
    its DeltaNet layers detach their convolution's and recurrence's inputs there, its latent attention detaches what it
    keeps of them (not the keys and values that it makes of that), and the prompt's last hidden state is detached.
    """

    def __init__(self, model: nn.Module, num_prompt_tokens: int) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config, self.norm, self.cut = base.config, base.model.norm, num_prompt_tokens
        self.layers = base.model.layers
        self.module = sys.modules[type(base).__module__]

    def _expand_detached(self, attention: nn.Module, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return type(attention).expand_kv(attention, self._detached(latent, 2), self._detached(k_rot, 2))

    def _detached(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim]
        return torch.cat([x.narrow(dim, 0, self.cut).detach(), x.narrow(dim, self.cut, size - self.cut)], dim)

    def __enter__(self) -> None:
        self.latent = [
            layer.self_attn for layer in self.layers if hasattr(getattr(layer, "self_attn", None), "expand_kv")
        ]
        for attention in self.latent:
            attention.expand_kv = partial(self._expand_detached, attention)
        if self.latent:  # whose attention function stays the eager one: it is known by name in the stock forward
            self.handle = self.norm.register_forward_pre_hook(lambda _, args: (self._detached(args[0], 1),))
            self.stock = {}
            return
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
        for attention in self.latent:
            del attention.expand_kv
        for name, function in self.stock.items():
            setattr(self.module, name, function)
