"""What a layer's attention does when a chunk runs through it: it reads the path's extents and writes the chunk's state.

Apart from `chunk.py`, which drives the layers, because each kind of state has its own.

Shape suffixes: B batch (1), T tokens of the chunk, H query heads, K key heads, D head width, W width of a row of
latents, L of a latent, S selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.models.latent import IndexProjections
from longstraw.ops.attention import AttentionOutput, ChunkAttention, ChunkKeys
from longstraw.ops.index_scan import IndexQueries, IndexRun, select_positions
from longstraw.ops.sparse_latent import SelectedRows, SparseLatentAttention
from longstraw.state.kinds import LatentKind
from longstraw.state.node import Chunk, NodeState


@dataclass
class ExtentSeam:
    """Attention of one chunk in one layer over the extents of its path."""

    node: NodeState
    layer: int
    chunk: Chunk
    window: int | None
    writes: bool = False  # keep the chunk's keys and values as state
    known: AttentionOutput | None = None  # given: not computed again; else set by `attend`

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
        state = self.node.key_value(self.layer)
        d_own_key, d_own_value = state.own_cotangents(self.chunk.begin, self.chunk.end)
        keys = ChunkKeys(
            earlier=self.node.runs_before(self.layer, self.chunk),
            start=self.node.start + self.chunk.begin,
            scale=scale,
            keys_per_backward_call=self.node.chunk_tokens,
            window=self.window,
            d_own_key_TKD=d_own_key,
            d_own_value_TKD=d_own_value,
            known=self.known,
        )
        out, lse = ChunkAttention.apply(q_BHTD[0], k_BKTD[0], v_BKTD[0], sinks_H, keys)
        self.known = AttentionOutput(out.detach(), lse)
        if self.writes:
            state.write(k_BKTD[0], v_BKTD[0])
        return out[None]


@dataclass
class LatentExtentSeam:
    """Latent attention of one chunk in one layer. Outputs are not kept for replay: in latent space they are wide.

    Queries that see at most `topk` positions see all of them, so they attend densely; the others to what is selected.
    """

    node: NodeState
    layer: int
    chunk: Chunk
    kind: LatentKind
    writes: bool = False  # keep the chunk's rows and index keys as state
    selected_TS: Tensor | None = None  # of the sparse queries. Given: not chosen again; else set by `attend`

    def needs_index(self) -> bool:
        return self.kind.indexer == "full" and (self.writes or self.selected_TS is None)

    def attend(
        self, q_BHTW: Tensor, rows_BTW: Tensor, index: IndexProjections | None, *, scale: float, latent_width: int
    ) -> Tensor:
        q_HTW, rows_TW = q_BHTW[0], rows_BTW[0]
        num_tokens = rows_TW.shape[0]
        num_dense = self._num_dense(num_tokens)
        if index is not None and num_dense < num_tokens and self.selected_TS is None:
            self.selected_TS = self._select(index, num_dense)
        parts = []
        if num_dense > 0:
            parts.append(self._attend_densely(q_HTW[:, :num_dense], rows_TW[:num_dense], scale)[..., :latent_width])
        if num_dense < num_tokens:
            parts.append(self._attend_selected(q_HTW[:, num_dense:], rows_TW, scale, latent_width))
        if self.writes:
            self.node.latent(self.layer).write(rows_TW, None if index is None else index.key_BTD[0])
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1))[None]

    @property
    def _start(self) -> int:
        return self.node.start + self.chunk.begin

    def _num_dense(self, num_tokens: int) -> int:
        if self.kind.topk is None:
            return num_tokens
        return min(max(self.kind.topk - self._start, 0), num_tokens)

    def _select(self, index: IndexProjections, num_dense: int) -> Tensor:
        assert self.kind.topk is not None, "an indexer selects so many"
        queries = IndexQueries(
            index.q_BTID[0, num_dense:], index.weight_BTI[0, num_dense:], start=self._start + num_dense
        )
        own = IndexRun(index.key_BTD[0], self._start)
        return select_positions(
            queries, [*self.node.index_runs_before(self.layer, self.chunk), own], topk=self.kind.topk
        )

    def _attend_densely(self, q_HTW: Tensor, rows_TW: Tensor, scale: float) -> Tensor:
        """Rows are one key head whose value is the key."""
        state = self.node.latent(self.layer)
        whole = rows_TW.shape[0] == self.chunk.num_tokens  # else the selected part sends the own rows' cotangents
        d_own = state.own_cotangents(self.chunk.begin, self.chunk.end) if whole else None
        keys = ChunkKeys(
            earlier=self.node.runs_before(self.layer, self.chunk),
            start=self._start,
            scale=scale,
            keys_per_backward_call=self.node.chunk_tokens,
            d_own_key_TKD=None if d_own is None else d_own[:, None],
        )
        out, _ = ChunkAttention.apply(q_HTW, rows_TW[None], rows_TW[None], None, keys)
        return out

    def _attend_selected(self, q_HTW: Tensor, rows_TW: Tensor, scale: float, latent_width: int) -> Tensor:
        assert self.selected_TS is not None, "selected here, by the layer below that shares its choice, or in forward"
        keys = SelectedRows(
            earlier=self.node.runs_before(self.layer, self.chunk),
            start=self._start,
            selected_TS=self.selected_TS,
            scale=scale,
            value_width=latent_width,
            d_own_NW=self.node.latent(self.layer).own_cotangents(self.chunk.begin, self.chunk.end),
        )
        return SparseLatentAttention.apply(q_HTW, rows_TW, keys)
