"""From last hidden states to logprobs of the next tokens and back, a block of tokens at a time.

Only a block's logits ever exist; the backward makes them again. Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longstraw.models.decoder import Decoder
from longstraw.ops.logprob import TokenLogprobs


@torch.no_grad()
def score_tokens(decoder: Decoder, hidden_TE: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies, float32 `[T]`, of the targets that the hidden states predict. No gradient."""
    parts = [
        TokenLogprobs.apply(decoder.logits(hidden_TE[begin:end]), targets_T[begin:end], temperature)
        for begin, end in _blocks(decoder, len(targets_T))
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def pull_tokens(
    decoder: Decoder,
    hidden_TE: Tensor,
    targets_T: Tensor,
    temperature: float,
    d_logprobs_T: Tensor,
    d_entropies_T: Tensor,
) -> Tensor:
    """Cotangent `[T, E]` of the hidden states; gradients of norm and head accumulate where they are trained."""
    d_hidden = torch.zeros_like(hidden_TE)
    with torch.enable_grad():
        for begin, end in _blocks(decoder, len(targets_T)):
            block = hidden_TE[begin:end].detach().requires_grad_()
            outs = TokenLogprobs.apply(decoder.logits(block), targets_T[begin:end], temperature)
            torch.autograd.backward(outs, (d_logprobs_T[begin:end], d_entropies_T[begin:end]))
            assert block.grad is not None, "logits depend on the hidden state"
            d_hidden[begin:end] = block.grad
    return d_hidden


def _blocks(decoder: Decoder, num_tokens: int) -> Iterator[tuple[int, int]]:
    size = decoder.head_block_tokens
    return ((begin, min(begin + size, num_tokens)) for begin in range(0, num_tokens, size))
