"""Sampling G responses in one batch from a captured state.

All responses attend to the same extents: their queries are one row of queries to each key head, so the prompt's keys
are read once per step, whatever G is. Each response's own keys lie in a buffer of the final size.

Shape suffixes: G responses, V vocabulary, H query heads, K key heads, N own tokens so far, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.progress import Stopwatch
from longstraw.models.decoder import Decoder
from longstraw.models.delta_net import RecurrentCache
from longstraw.ops.attention import KeyRun, add_sinks, attend_shared, merge_partials
from longstraw.ops.kernels import attend, wide_dtype
from longstraw.records import Response, SamplingSettings
from longstraw.state.node import NodeState
from longstraw.state.recurrent import Boundary


@dataclass
class DecodeSeam:
    """Attention of one new token of each response over the shared path and the response's own keys."""

    shared: list[KeyRun]
    start: int  # position of the responses' first token
    max_new_tokens: int
    window: int | None
    own: tuple[Tensor, Tensor] | None = None  # [G, max_new_tokens, K, D]
    num_own: int = 0

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
        num_responses, num_heads, _, width = q_BHTD.shape
        self._append(k_BKTD[:, :, 0], v_BKTD[:, :, 0])
        first_own, shared = self._visible()
        out, lse = attend_shared(q_BHTD[:, :, 0].transpose(0, 1), shared, scale)  # [H, G, D]
        assert self.own is not None, "appended above"
        own_k, own_v = (x[:, first_own : self.num_own].transpose(1, 2) for x in self.own)
        q = q_BHTD.reshape(num_responses, own_k.shape[1], -1, width)  # a key head's queries in one row
        part, part_lse = attend(q, own_k, own_v, scale=scale)
        out, lse = merge_partials(
            out,
            lse,
            part.reshape(num_responses, num_heads, -1).transpose(0, 1),
            part_lse.reshape(num_responses, num_heads).transpose(0, 1),
        )
        if sinks_H is not None:
            out, _ = add_sinks(out, lse, sinks_H)
        return out.transpose(0, 1)[:, :, None].to(q_BHTD.dtype)

    def _append(self, k_GKD: Tensor, v_GKD: Tensor) -> None:
        if self.own is None:
            shape = (k_GKD.shape[0], self.max_new_tokens, *k_GKD.shape[1:])
            self.own = (k_GKD.new_empty(shape), v_GKD.new_empty((*shape[:-1], v_GKD.shape[-1])))
        for buffer, new in zip(self.own, (k_GKD, v_GKD), strict=True):
            buffer[:, self.num_own] = new
        self.num_own += 1

    def _visible(self) -> tuple[int, list[KeyRun]]:
        """First own token and shared runs that the newest token sees."""
        if self.window is None:
            return 0, self.shared
        first = self.start + self.num_own - self.window  # position of the oldest visible key
        shared = [run.cut(max(0, first - run.start), len(run)) for run in self.shared if run.start + len(run) > first]
        return max(0, first - self.start), shared


class ResponseBatch:
    """The G responses being sampled: one seam or recurrent boundary per layer."""

    def __init__(self, decoder: Decoder, node: NodeState, num_responses: int, max_new_tokens: int) -> None:
        self._decoder = decoder
        self._position = node.end
        self._layers: list[DecodeSeam | Boundary] = [
            node.recurrent(layer).end.expand(num_responses)
            if decoder.recurrent(layer)
            else DecodeSeam(node.runs(layer), node.end, max_new_tokens, decoder.windows[layer])
            for layer in range(decoder.num_layers)
        ]

    def step(self, token_ids_G: Tensor) -> Tensor:
        """Append one token to each response; last hidden states `[G, E]`."""
        decoder = self._decoder
        hidden = decoder.embed(token_ids_G[:, None])
        rotary = decoder.rotary(hidden, self._position)
        for index, layer in enumerate(self._layers):
            if isinstance(layer, DecodeSeam):
                hidden = decoder.run_layer(index, hidden, rotary, start=self._position, seam=layer)
                continue
            cache = RecurrentCache(layer.conv_tail_BCW, layer.matrix_BHKV)
            hidden = decoder.run_layer(index, hidden, rotary, start=self._position, seam=cache)
            self._layers[index] = Boundary(cache.new_conv_tail, cache.new_matrix_state)
        self._position += 1
        return hidden[:, 0]


@torch.no_grad()
def sample_responses(
    decoder: Decoder, node: NodeState, num_responses: int, settings: SamplingSettings, watch: Stopwatch
) -> list[Response]:
    """Draw responses in one batch until each has met a stop id or the token limit."""
    assert node.last_hidden is not None, "captured"
    generator = torch.Generator(device=decoder.device).manual_seed(settings.seed)
    batch = ResponseBatch(decoder, node, num_responses, settings.max_new_tokens)
    stops = torch.tensor(settings.stop_ids, dtype=torch.int64, device=decoder.device)
    logits_GV = decoder.logits(node.last_hidden).expand(num_responses, -1)
    finished_G = torch.zeros(num_responses, dtype=torch.bool, device=decoder.device)
    lengths_G = torch.full_like(finished_G, settings.max_new_tokens, dtype=torch.int64)
    tokens, logprobs = [], []
    for step in range(settings.max_new_tokens):
        tokens_G, logprobs_G = draw(logits_GV, settings, generator)
        tokens.append(tokens_G)
        logprobs.append(logprobs_G)
        stopped_G = torch.isin(tokens_G, stops) & ~finished_G
        lengths_G[stopped_G] = step + 1
        finished_G |= stopped_G
        watch.advance(num_responses)
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
