"""The updates LongStraw is compared with: full-sequence training, and prefix-grouper's joint graph.

Both use the stock model, stock sdpa attention and ordinary autograd, and make the logits of response tokens only.

Shape suffixes: B batch, H heads, P prompt tokens, R response tokens of one response, S all tokens of a sequence, V
vocabulary, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from prefix_grouper import PrefixGrouper
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from small_models import Problem

GROUPED_ATTENTION = "benchmark_prefix_grouper"


@dataclass(frozen=True, eq=False)
class GroupedLayout:
    """What the grouped attention needs to know of the one sequence that holds a prompt and all its responses."""

    grouper: PrefixGrouper
    suffix_mask: Tensor | None  # additive, [R, P + R]; None where the kernel knows the bottom-right causal case


def token_logprobs(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    return logits_RV.float().log_softmax(-1).gather(-1, token_ids_R[:, None]).squeeze(-1)


def dapo_loss(logprobs_R: Tensor, advantage: float, *, num_active_tokens: int, epsilon: float = 0.2) -> Tensor:
    """One response's part of the loss; the old policy is the current one, so the ratio is 1 (its gradient is not 0)."""
    ratio_R = (logprobs_R - logprobs_R.detach()).exp()
    clipped_R = ratio_R.clamp(1 - epsilon, 1 + epsilon)
    return -torch.minimum(ratio_R * advantage, clipped_R * advantage).sum() / num_active_tokens


def set_checkpointing(model: PeftModel, enabled: bool) -> None:
    base = model.get_base_model()
    model.train()  # the library checkpoints in training mode only; no dropout is configured
    if enabled:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        base.gradient_checkpointing_disable()


def full_sequence_update(model: PeftModel, problem: Problem) -> None:
    """Prompt + response through the whole model, one response at a time; gradients are left in `.grad`.

    Gradient checkpointing per layer and `logits_to_keep`, as TRL's GRPOTrainer does with a batch of one.
    """
    set_checkpointing(model, True)
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    for response_R, advantage in zip(problem.responses, problem.advantages, strict=True):
        input_ids = torch.cat([problem.prompt_P, response_R]).to(device)[None]
        logits_RV = model(input_ids=input_ids, use_cache=False, logits_to_keep=len(response_R) + 1).logits[0, :-1]
        logprobs_R = token_logprobs(logits_RV, response_R.to(device))
        dapo_loss(logprobs_R, advantage, num_active_tokens=problem.num_response_tokens).backward()
        del logits_RV, logprobs_R


def _grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: GroupedLayout,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """prefix-grouper's attention with stock sdpa for its two calls.

    The package hands on a padding mask, which stands for flash-attention's varlen interface; here nothing is padded
    (one prompt, equal responses), so causality is all that is left to say.
    """

    def attend(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, _padding: Tensor) -> Tensor:
        is_prefix = q_BHSD.shape[2] == k_BHSD.shape[2]
        mask = None if is_prefix else layout.suffix_mask
        if mask is None and not is_prefix:
            mask = causal_lower_right(q_BHSD.shape[2], k_BHSD.shape[2])
        out_BHSD = scaled_dot_product_attention(
            q_BHSD, k_BHSD, v_BHSD, attn_mask=mask, is_causal=is_prefix, scale=scaling, enable_gqa=True
        )
        return out_BHSD.transpose(1, 2)

    return layout.grouper.forward(attend, query, key, value), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED_ATTENTION, _grouped_attention)


def prefix_grouper_update(model: PeftModel, problem: Problem, *, checkpointing: bool) -> None:
    """The prompt and all responses in one sequence and one graph; gradients are left in `.grad`.

    Dense models only: the package has no notion of a recurrent state. The head runs response by response under
    checkpointing, so that logits of all responses never coexist. The CPU needs the suffix mask as a tensor (one for all
    layers); CUDA's flash kernel knows the bottom-right causal case.
    """
    set_checkpointing(model, checkpointing)
    model.zero_grad(set_to_none=True)
    base = model.get_base_model()
    device, num_responses = base.lm_head.weight.device, len(problem.responses)
    num_prompt, num_response = len(problem.prompt_P), len(problem.responses[0])
    grouper = PrefixGrouper([[num_prompt, *(len(response_R) for response_R in problem.responses)]], device=device)
    response_positions = torch.arange(num_prompt, num_prompt + num_response).repeat(num_responses)
    mask = None
    if device.type == "cpu":
        mask = base.lm_head.weight.new_full((num_response, num_prompt + num_response), float("-inf"))
        mask.triu_(num_prompt + 1)
    stock_attention = base.config._attn_implementation
    base.set_attn_implementation(GROUPED_ATTENTION)
    try:
        hidden = base.model(
            input_ids=torch.cat([problem.prompt_P, *problem.responses]).to(device)[None],
            position_ids=torch.cat([torch.arange(num_prompt), response_positions]).to(device)[None],
            use_cache=False,
            layout=GroupedLayout(grouper, mask),
        ).last_hidden_state[0, num_prompt - 1 :]
        last_prompt_hidden, response_hidden = hidden[:1], hidden[1:].split(num_response)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for response_R, advantage, own in zip(problem.responses, problem.advantages, response_hidden, strict=True):
            before = torch.cat([last_prompt_hidden, own[:-1]])
            logprobs_R = checkpoint(_head_logprobs, base.lm_head, before, response_R.to(device), use_reentrant=False)
            loss = loss + dapo_loss(logprobs_R, advantage, num_active_tokens=problem.num_response_tokens)
        loss.backward()  # recomputes layers, so the grouped attention must still be in place
    finally:
        base.set_attn_implementation(stock_attention)


def _head_logprobs(head: torch.nn.Module, hidden_RH: Tensor, token_ids_R: Tensor) -> Tensor:
    return token_logprobs(head(hidden_RH), token_ids_R)
