"""Logprob and entropy of given tokens from one block of logits, in float32, with a closed-form backward.

Callers keep the block small (`tokens_per_block`): a block's logits are the largest thing of vocabulary width that ever
exists. Nothing but the logits and one number per token is kept for backward.

Shape suffixes: T tokens of the block, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20
MAX_BLOCK_TOKENS = 128


def tokens_per_block(vocabulary_size: int) -> int:
    """How many tokens' logits are made at a time: at most 128, and at most 64 MiB of float32."""
    return max(1, min(MAX_BLOCK_TOKENS, BLOCK_BYTES // (4 * vocabulary_size)))


class TokenLogprobs(torch.autograd.Function):
    """`(logits_TV, targets_T, temperature) -> (logprobs_T, entropies_T)` of softmax(logits / temperature).

    Outputs are float32 (float64 for float64 logits). Differentiable in the logits; the gradient has their dtype.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits_TV: Tensor, targets_T: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        log_p = _log_softmax(logits_TV, temperature)
        logprobs_T = log_p.gather(1, targets_T[:, None])[:, 0]
        entropies_T = _entropies(log_p)
        ctx.save_for_backward(logits_TV, targets_T, entropies_T)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return logprobs_T, entropies_T

    @staticmethod
    def backward(ctx, d_logprobs_T: Tensor, d_entropies_T: Tensor):  # type: ignore[no-untyped-def]
        logits_TV, targets_T, entropies_T = ctx.saved_tensors
        log_p = _log_softmax(logits_TV, ctx.temperature)
        p = log_p.exp()
        # d logprob / d logits = onehot - p; d entropy / d logits = -p (log p + entropy); both over the temperature.
        d_logits = log_p.add_(entropies_T[:, None]).mul_(d_entropies_T[:, None]).add_(d_logprobs_T[:, None])
        d_logits = d_logits.mul_(p).neg_()
        d_logits.scatter_add_(1, targets_T[:, None], d_logprobs_T[:, None])
        return d_logits.div_(ctx.temperature).to(logits_TV.dtype), None, None


def _log_softmax(logits_TV: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled = logits_TV.to(wide) / temperature
    return scaled.sub_(scaled.logsumexp(1, keepdim=True))


def _entropies(log_p_TV: Tensor) -> Tensor:
    # A token of probability 0 (log -inf) adds 0, not nan.
    return -(log_p_TV.exp() * log_p_TV.clamp(min=torch.finfo(log_p_TV.dtype).min)).sum(1)


def token_logprobs_naive(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Oracle of `TokenLogprobs`: the definitions, by autograd."""
    log_p = (logits_TV / temperature).log_softmax(-1)
    return log_p[torch.arange(len(targets_T)), targets_T], -(log_p.exp() * log_p).sum(-1)
