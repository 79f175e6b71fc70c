"""One more token for each of G responses, in one batch over the shared state of their path.

All responses attend to the same extents: their queries are one row of queries to each key head, so the prompt's keys
are read once per step, whatever G is. Each response's own state lies in a buffer of the final size.

Shape suffixes: G responses, H query heads, K key heads, N own tokens so far, D head width or width of an index key, W
width of a row of latents, S selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw.execution.runner import Runner
from longstraw.execution.shared import (
    ReplicatedHeads,
    SharedIndexKeys,
    SharedKeys,
    shared_index_keys,
    shared_keys,
    shared_rows,
)
from longstraw.models.delta_net import RecurrentCache
from longstraw.models.latent import IndexProjections
from longstraw.ops.attention import add_sinks, merge_partials
from longstraw.ops.index_scan import IndexQueries, select_positions_per_row
from longstraw.ops.kernels import attend
from longstraw.state.kinds import KeyValueKind, LatentKind, RecurrentKind
from longstraw.state.node import NodeState
from longstraw.state.recurrent import Boundary


@dataclass
class OwnTokens:
    """What each response keeps of its own tokens: a buffer `[G, capacity, ...]`, filled one token at a time."""

    capacity: int
    num_tokens: int = 0
    _buffer: Tensor | None = None

    def append(self, new: Tensor) -> Tensor:
        """`[G, ...]` in; a view of all own tokens `[G, N, ...]` out."""
        if self._buffer is None:
            self._buffer = new.new_empty(new.shape[0], self.capacity, *new.shape[1:])
        self._buffer[:, self.num_tokens] = new
        self.num_tokens += 1
        return self._buffer[:, : self.num_tokens]


class DecodeSeam:
    """Attention of one new token of each response over the shared path and the response's own keys."""

    def __init__(self, shared: SharedKeys, start: int, max_new_tokens: int, window: int | None) -> None:
        self._shared = shared
        self._start = start  # position of the responses' first token
        self._window = window
        self._keys, self._values = OwnTokens(max_new_tokens), OwnTokens(max_new_tokens)

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
        own_k, own_v = self._keys.append(k_BKTD[:, :, 0]), self._values.append(v_BKTD[:, :, 0])
        if self._window is None:
            return attend_one_token(q_BHTD, self._shared, (own_k, own_v), scale, sinks_H)
        first = self._start + self._keys.num_tokens - self._window  # position of the oldest visible key
        first_own = max(0, first - self._start)
        own = own_k[:, first_own:], own_v[:, first_own:]
        return attend_one_token(q_BHTD, self._shared.since(first), own, scale, sinks_H)


@dataclass
class LatentDecodeSeam:
    """Latent attention of one new token of each response: dense up to `topk` positions, then to selected ones."""

    kind: LatentKind
    shared: SharedKeys
    shared_index: SharedIndexKeys
    start: int  # position of the responses' first token
    max_new_tokens: int
    selected_GS: Tensor | None = None  # of the newest token; in a layer that shares, set by the layer below
    _rows: OwnTokens = field(init=False)
    _index_keys: OwnTokens = field(init=False)

    def __post_init__(self) -> None:
        self._rows, self._index_keys = OwnTokens(self.max_new_tokens), OwnTokens(self.max_new_tokens)

    def needs_index(self) -> bool:
        return self.kind.indexer == "full"

    def attend(
        self, q_BHTW: Tensor, rows_BTW: Tensor, index: IndexProjections | None, *, scale: float, latent_width: int
    ) -> Tensor:
        own_GNW = self._rows.append(rows_BTW[:, 0])
        num_visible = self.start + self._rows.num_tokens
        if index is not None:
            own_index_GND = self._index_keys.append(index.key_BTD[:, 0])
            self.selected_GS = self._select(index, own_index_GND, num_visible)
        if self.kind.topk is None or num_visible <= self.kind.topk:
            own = own_GNW[:, :, None]
            return attend_one_token(q_BHTW, self.shared, (own, own), scale, None)[..., :latent_width]
        assert self.selected_GS is not None, "chosen above or by the layer below that shares its choice"
        q_GHW = q_BHTW[:, :, 0]
        out_GHL = self.shared.attend_selected(q_GHW, self.selected_GS, own_GNW, scale=scale, value_width=latent_width)
        return out_GHL[:, :, None]

    def _select(self, index: IndexProjections, own_GND: Tensor, num_visible: int) -> Tensor | None:
        if self.kind.topk is None or num_visible <= self.kind.topk:
            return None
        queries = IndexQueries(index.q_BTID[:, 0], index.weight_BTI[:, 0], start=num_visible - 1)
        runs = self.shared_index.runs(own_GND[0])
        return select_positions_per_row(queries, runs, own_GND, topk=self.kind.topk)


def attend_one_token(
    q_BHTD: Tensor, shared: SharedKeys, own: tuple[Tensor, Tensor], scale: float, sinks_H: Tensor | None
) -> Tensor:
    """`[G, H, 1, D]`: each response's query over the shared keys and its own keys and values `[G, N, K, D]`."""
    num_responses, num_heads, _, width = q_BHTD.shape
    out, lse = shared.attend(q_BHTD[:, :, 0].transpose(0, 1), scale)  # [H, G, D]
    own_k, own_v = (x.transpose(1, 2) for x in own)
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


class ResponseBatch:
    """The G responses being sampled: one seam or recurrent boundary per layer. All ranks of a context axis run it."""

    def __init__(self, run: Runner, node: NodeState, num_responses: int, max_new_tokens: int) -> None:
        self._decoder = run.decoder
        self._position = node.end
        self._heads = ReplicatedHeads(run.context) if run.is_divided else None
        self._layers = [_layer(run, node, layer, num_responses, max_new_tokens) for layer in range(len(node.layers))]

    def step(self, token_ids_G: Tensor) -> Tensor:
        """Append one token to each response; last hidden states `[G, E]`."""
        hidden = self._decoder.embed(token_ids_G[:, None])
        position_T = torch.tensor([self._position], device=hidden.device)
        rotary = self._decoder.rotary(hidden, position_T)
        selected_below = None
        for index, layer in enumerate(self._layers):
            if isinstance(layer, Boundary):
                seam = RecurrentCache(layer.conv_tail_BCW, layer.matrix_BHKV, heads=self._heads)
                hidden = self._decoder.run_layer(index, hidden, rotary, position_T=position_T, seam=seam)
                self._layers[index] = Boundary(seam.new_conv_tail, seam.new_matrix_state)
                continue
            if isinstance(layer, LatentDecodeSeam) and layer.kind.indexer == "shared":
                layer.selected_GS = selected_below
            hidden = self._decoder.run_layer(index, hidden, rotary, position_T=position_T, seam=layer)
            selected_below = layer.selected_GS if isinstance(layer, LatentDecodeSeam) else None
        self._position += 1
        return hidden[:, 0]


def _layer(
    run: Runner, node: NodeState, layer: int, num_responses: int, max_new_tokens: int
) -> DecodeSeam | LatentDecodeSeam | Boundary:
    match run.decoder.kinds[layer]:
        case RecurrentKind():
            return node.recurrent(layer).end.expand(num_responses)
        case LatentKind() as kind:
            shared, index = shared_rows(run, node, layer), shared_index_keys(run, node, layer)
            return LatentDecodeSeam(kind, shared, index, node.end, max_new_tokens)
        case KeyValueKind(window):
            return DecodeSeam(shared_keys(run, node, layer, window), node.end, max_new_tokens, window)
