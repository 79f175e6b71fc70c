"""Sampling G responses in one batch from a captured state.

Shape suffixes: G responses, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.execution.decode import ResponseBatch
from longstraw.execution.runner import Runner
from longstraw.ops.kernels import wide_dtype
from longstraw.records import Response, SamplingSettings
from longstraw.state.node import NodeState


@torch.no_grad()
def sample_responses(run: Runner, node: NodeState, num_responses: int, settings: SamplingSettings) -> list[Response]:
    """Draw responses in one batch until each has met a stop id or the token limit."""
    assert node.last_hidden is not None, "captured"
    decoder = run.decoder
    generator = torch.Generator(device=decoder.device).manual_seed(settings.seed)
    batch = ResponseBatch(run, node, num_responses, settings.max_new_tokens)
    stops = torch.tensor(settings.stop_ids, dtype=torch.int64, device=decoder.device)
    logits_GV = decoder.logits(node.last_hidden).expand(num_responses, -1)
    finished_G = torch.zeros(num_responses, dtype=torch.bool, device=decoder.device)
    lengths_G = torch.full_like(finished_G, settings.max_new_tokens, dtype=torch.int64)
    tokens, logprobs = [], []
    for step in range(settings.max_new_tokens):
        tokens_G, logprobs_G = (run.as_on_first_rank(x) for x in draw(logits_GV, settings, generator))
        tokens.append(tokens_G)
        logprobs.append(logprobs_G)
        stopped_G = torch.isin(tokens_G, stops) & ~finished_G
        lengths_G[stopped_G] = step + 1
        finished_G |= stopped_G
        run.watch.advance(num_responses)
        if bool(finished_G.all()) or step + 1 == settings.max_new_tokens:
            break
        logits_GV = decoder.logits(batch.step(tokens_G))
    return _responses(torch.stack(tokens, 1), torch.stack(logprobs, 1), lengths_G, finished_G, settings)


def draw(logits_GV: Tensor, settings: SamplingSettings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row and its logprob under softmax(logits / temperature), before top-k, top-p and min-p.

    Greedy (temperature 0) takes the likeliest token and gives its logprob at temperature 1.
    """
    wide = logits_GV.to(wide_dtype(logits_GV.dtype))
    greedy = settings.temperature == 0
    log_p = (wide if greedy else wide / settings.temperature).log_softmax(-1)
    if greedy:
        tokens_G = log_p.argmax(-1)
    else:
        tokens_G = torch.multinomial(keep_likely(log_p, settings).exp(), 1, generator=generator)[:, 0]
    return tokens_G, log_p.gather(1, tokens_G[:, None])[:, 0].float()


def keep_likely(log_p_GV: Tensor, settings: SamplingSettings) -> Tensor:
    """Set tokens outside top-k, top-p and min-p to -inf; each filter looks at what the one before left."""
    if 0 < settings.top_k < log_p_GV.shape[-1]:
        least = log_p_GV.topk(settings.top_k).values[:, -1:]
        log_p_GV = log_p_GV.masked_fill(log_p_GV < least, float("-inf"))
    if settings.top_p < 1:
        ordered, order = log_p_GV.log_softmax(-1).sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the strictly likelier tokens
        dropped = torch.zeros_like(order, dtype=torch.bool).scatter(1, order, before >= settings.top_p)
        log_p_GV = log_p_GV.masked_fill(dropped, float("-inf"))
    if settings.min_p:
        floor = log_p_GV.max(-1, keepdim=True).values + torch.tensor(settings.min_p).log().item()
        log_p_GV = log_p_GV.masked_fill(log_p_GV < floor, float("-inf"))
    return log_p_GV


def _responses(
    tokens_GT: Tensor, logprobs_GT: Tensor, lengths_G: Tensor, finished_G: Tensor, settings: SamplingSettings
) -> list[Response]:
    temperature = settings.temperature or 1.0
    rows: Sequence[tuple[Tensor, Tensor]] = list(zip(tokens_GT.cpu(), logprobs_GT.cpu(), strict=True))
    return [
        Response(ids[:length], values[:length], temperature=temperature, truncated=not finished)
        for (ids, values), length, finished in zip(rows, lengths_G.tolist(), finished_G.tolist(), strict=True)
    ]
