"""The seams of a chunk whose tokens are divided over a context axis: the same layers, their state met by exchanges.

Keys and values stay where they were computed and queries are sent to them; latents stream past the queries, or get them
sent too where that moves fewer bytes, or are fetched where they are selected; DeltaNet layers trade tokens for heads.
Every rank runs every layer of every chunk, also without tokens of its own.

Shape suffixes: as in `seams.py`; T are this rank's tokens of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.runner import Runner
from longstraw.models.latent import IndexProjections
from longstraw.ops.attention import AttentionOutput
from longstraw.parallel.context import OwnedKeys, SentQueries, SplitKeys
from longstraw.parallel.heads import heads_to_tokens, tokens_to_heads
from longstraw.parallel.ownership import ChunkSplit, NodeSplit
from longstraw.parallel.selected_rows import DividedIndexKeys, SelectedSetting, attend_selected, select_streamed
from longstraw.parallel.streamed_rows import DividedRows, StreamedRows, StreamSetting
from longstraw.parallel.work import AttentionWidths, cheaper_exchange
from longstraw.state.kinds import LatentKind
from longstraw.state.node import Chunk, NodeState


@dataclass
class SplitExtentSeam:
    """Attention of this rank's tokens of a chunk over the keys of all ranks."""

    run: Runner
    node: NodeState
    layer: int
    chunk: Chunk
    window: int | None
    writes: bool = False
    known: AttentionOutput | None = None

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
        state = self.node.key_value(self.layer)
        d_own_key, d_own_value = state.own_cotangents(self.chunk.own_begin, self.chunk.own_end)
        keys = SplitKeys(
            exchange=self.run.context,
            split=self.run.split(self.chunk),
            earlier=owned_keys(self.run, self.node, self.layer, self.chunk, with_positions=self.window is not None),
            start=self.node.start + self.chunk.begin,
            scale=scale,
            keys_per_backward_call=self.node.chunk_tokens,
            window=self.window,
            d_own_key_TKD=d_own_key,
            d_own_value_TKD=d_own_value,
            known=None if self.known is None else (self.known.out_HTD, self.known.lse_HT),
        )
        q, k, v = (x[0, :, : self.chunk.num_own_tokens] for x in (q_BHTD, k_BKTD, v_BKTD))
        out, lse = SentQueries.apply(q, k, v, sinks_H, keys)
        self.known = AttentionOutput(out.detach(), lse)
        if self.writes:
            state.write(k, v)
        return _with_stand_in(out[None], q_BHTD.shape[2], dim=2)


@dataclass
class SplitLatentSeam:
    """Latent attention of this rank's tokens of a chunk over the rows of all ranks."""

    run: Runner
    node: NodeState
    layer: int
    chunk: Chunk
    kind: LatentKind
    writes: bool = False
    selected_TS: Tensor | None = None

    def needs_index(self) -> bool:
        return self.kind.indexer == "full" and (self.writes or self.selected_TS is None)

    def attend(
        self, q_BHTW: Tensor, rows_BTW: Tensor, index: IndexProjections | None, *, scale: float, latent_width: int
    ) -> Tensor:
        num_own = self.chunk.num_own_tokens
        q_HTW, rows_TW = q_BHTW[0, :, :num_own], rows_BTW[0, :num_own]
        if self.kind.topk is None and self._sends_queries(q_HTW.shape[0], rows_TW):
            out_HTV = self._attend_by_sent_queries(q_HTW, rows_TW, scale)[..., :latent_width]
            if self.writes:
                self.node.latent(self.layer).write(rows_TW, None)
            return _with_stand_in(out_HTV[None], q_BHTW.shape[2], dim=2)
        state, split = self.node.latent(self.layer), self.run.split(self.chunk)
        start, num_tokens = self.node.start + self.chunk.begin, self.chunk.num_tokens
        num_dense = num_tokens if self.kind.topk is None else min(max(self.kind.topk - start, 0), num_tokens)
        num_own_dense = sum(map(len, split.pieces_before(num_dense, self.run.context.rank)))
        d_own = state.own_cotangents(self.chunk.own_begin, self.chunk.own_end)
        earlier = self._earlier()
        parts = []
        if num_dense > 0:
            setting = StreamSetting(
                exchange=self.run.context,
                split=split,
                earlier=earlier,
                scale=scale,
                value_width=latent_width,
                slice_rows=self.node.chunk_tokens,
                num_dense=num_dense,
                d_own_TW=d_own if num_dense == num_tokens else None,
            )
            parts.append(StreamedRows.apply(q_HTW[:, :num_own_dense], rows_TW, setting))
        if num_dense < num_tokens:
            sparse = SelectedSetting(self.run.context, split, earlier, start, d_own)
            if index is not None and self.selected_TS is None:
                self.selected_TS = self._select(index, num_dense, num_own_dense, sparse)
            assert self.selected_TS is not None, "selected above, or by the layer below that shares its choice"
            q_sparse = q_HTW[:, num_own_dense:]
            parts.append(
                attend_selected(q_sparse, rows_TW, self.selected_TS, sparse, scale=scale, value_width=latent_width)
            )
        if self.writes:
            state.write(rows_TW, None if index is None else index.key_BTD[0, :num_own])
        return _with_stand_in(torch.cat(parts, 1)[None], q_BHTW.shape[2], dim=2)

    def _sends_queries(self, num_heads: int, rows_TW: Tensor) -> bool:
        """Whether that moves fewer bytes for this chunk, counted; where values are cut from rows they travel whole."""
        width = rows_TW.shape[1]
        widths = AttentionWidths(num_heads, width, width, width, rows_TW.element_size())
        split, num_before = self.run.split(self.chunk), self.node.start + self.chunk.begin
        return cheaper_exchange(widths, split, num_before) == "send_queries"

    def _attend_by_sent_queries(self, q_HTW: Tensor, rows_TW: Tensor, scale: float) -> Tensor:
        """Rows are one key head whose value is the key."""
        d_own = self.node.latent(self.layer).own_cotangents(self.chunk.own_begin, self.chunk.own_end)
        no_window = torch.empty(0, dtype=torch.int64)
        keys = SplitKeys(
            exchange=self.run.context,
            split=self.run.split(self.chunk),
            earlier=[OwnedKeys(rows.mine, no_window) for rows in self._earlier() if rows.mine is not None],
            start=self.node.start + self.chunk.begin,
            scale=scale,
            keys_per_backward_call=self.node.chunk_tokens,
            d_own_key_TKD=None if d_own is None else d_own[:, None],
        )
        out, _ = SentQueries.apply(q_HTW, rows_TW[None], rows_TW[None], None, keys)
        return out

    def _select(self, index: IndexProjections, num_dense: int, num_own_dense: int, setting: SelectedSetting) -> Tensor:
        assert self.kind.topk is not None, "an indexer selects so many"
        earlier = divided_index_keys(self.run, self.node, self.layer, self.chunk)
        num_own = self.chunk.num_own_tokens
        return select_streamed(
            index.q_BTID[0, num_own_dense:num_own],
            index.weight_BTI[0, num_own_dense:num_own],
            index.key_BTD[0, :num_own],
            earlier,
            setting=setting,
            num_dense=num_dense,
            topk=self.kind.topk,
        )

    def _earlier(self) -> list[DividedRows]:
        return divided_rows(self.run, self.node, self.layer, self.chunk)


@dataclass(frozen=True)
class SplitHeads:
    """How a DeltaNet layer trades this rank's tokens of a chunk for all tokens of its heads, and back."""

    run: Runner
    split: ChunkSplit

    def to_heads(self, x_BTHD: Tensor) -> Tensor:
        return tokens_to_heads(x_BTHD[:, : self._num_own], self.run.context, self.split)

    def to_tokens(self, x_BTHD: Tensor) -> Tensor:
        return _with_stand_in(heads_to_tokens(x_BTHD, self.run.context, self.split), max(1, self._num_own), dim=1)

    @property
    def _num_own(self) -> int:
        return self.split.sizes[self.run.context.rank]

    def own(self, x_H: Tensor) -> Tensor:
        return x_H.chunk(self.run.context.degree)[self.run.context.rank]


def _with_stand_in(out: Tensor, num_tokens: int, *, dim: int) -> Tensor:
    """Zeros for the token that stands in where a rank has none, so that its graph still ends in the collectives."""
    missing = num_tokens - out.shape[dim]
    if missing == 0:
        return out
    shape = [*out.shape[:dim], missing, *out.shape[dim + 1 :]]
    return torch.cat([out, out.new_zeros(shape)], dim)


def owned_keys(
    run: Runner, node: NodeState, layer: int, chunk: Chunk | None, *, with_positions: bool
) -> list[OwnedKeys]:
    """This rank's keys of the path before a chunk of the node; without one, of the whole path."""
    owned = []
    for each, _ in _path(run, node, chunk):
        end = chunk.own_begin if chunk is not None and each is node and not node.constant else None
        state = each.key_value(layer)
        for keys in state.run(end):
            positions = torch.empty(0, dtype=torch.int64)
            if with_positions:
                split = run.node_split(len(each.token_ids))
                kept = slice(state.num_dropped, state.num_dropped + len(keys))
                positions = split.positions(run.context.rank, start=each.start)[kept]
            owned.append(OwnedKeys(keys, positions))
    return owned


def divided_rows(run: Runner, node: NodeState, layer: int, chunk: Chunk | None) -> list[DividedRows]:
    """The rows of the path before a chunk of the node, and where they are; without one, of the whole path."""
    divided = []
    for each, split in _path(run, node, chunk):
        num_own = split.sizes[run.context.rank]
        mine = next(iter(each.latent(layer).run(num_own)), None)
        divided.append(DividedRows(mine, split, each.start, each.constant))
    return divided


def divided_index_keys(run: Runner, node: NodeState, layer: int, chunk: Chunk | None) -> list[DividedIndexKeys]:
    """The index keys of the same tokens."""
    divided = []
    for each, split in _path(run, node, chunk):
        mine = next(iter(each.latent(layer).index_run(split.sizes[run.context.rank])), None)
        divided.append(DividedIndexKeys(mine, split, each.start))
    return divided


def _path(run: Runner, node: NodeState, chunk: Chunk | None) -> list[tuple[NodeState, NodeSplit]]:
    """Nodes with earlier tokens, and how these are divided."""
    path = [(each, run.node_split(len(each.token_ids))) for each in node.path()]
    if chunk is None:
        return path
    num_chunks = node.chunks.index(chunk)
    own = [(node, path[-1][1].first_chunks(num_chunks))] if num_chunks > 0 else []
    return path[:-1] + own
