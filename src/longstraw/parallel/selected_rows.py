"""Sparse latent attention on the context axis: queries choose over the whole path and fetch what they chose.

Index keys of all ranks stream past in position order, so every query gets the exact global selection. The rows that any
of a rank's queries selected are then fetched from their owners, each once, which never moves more than streaming all of
them would; in backward their cotangents return and are summed at the owner. Working memory is the fetched rows.

Shape suffixes: H heads, T queries of this rank, S selected positions, I index heads, D index width, N rows, W row
width, V value width, U different selected rows, R rows asked of this rank, A ranks of the axis, X stretches of a path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longstraw.ops.index_scan import IndexQueries, IndexRun, select_positions
from longstraw.ops.kernels import wide_dtype
from longstraw.ops.sparse_latent import SelectedRows, SparseLatentAttention
from longstraw.ops.staging import Passage, Rows
from longstraw.parallel.arrange import gather_chunk, in_position_order
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit
from longstraw.parallel.streamed_rows import DividedRows


@dataclass(frozen=True, eq=False)
class DividedIndexKeys:
    """The index keys of one extent of the path, divided over the axis. Alike on all ranks but for `mine`."""

    mine: IndexRun | None  # the start has no meaning; None if this rank owns none
    node: NodeSplit  # of the tokens in it: those of a whole node, or of its first chunks
    start: int  # position of the node's first token


@dataclass(frozen=True, eq=False)
class SelectedSetting:
    """The setting of one chunk in one sparse layer. Alike on all ranks but for own rows and `d_own_TW`."""

    exchange: Exchange
    split: ChunkSplit
    earlier: Sequence[DividedRows]  # oldest first, contiguous from position 0 up to the chunk
    start: int  # position of the chunk's first token
    d_own_TW: Tensor | None = None  # cotangents that later tokens sent to this rank's own rows, float32

    @property
    def nodes(self) -> list[tuple[int, NodeSplit]]:
        """Every stretch of the path with its first position: the extents, then the chunk itself."""
        chunk = NodeSplit(self.split.num_tokens, self.split.num_tokens, self.split.degree, self.split.order)
        return [*((each.start, each.node) for each in self.earlier), (self.start, chunk)]

    @cached_property
    def first_rows(self) -> list[list[int]]:
        """`[A, X + 1]`: where each stretch begins, and the last ends, when a rank's rows are counted through all."""
        nodes = [node for _, node in self.nodes]
        return [list(accumulate((n.sizes[rank] for n in nodes), initial=0)) for rank in range(self.split.degree)]

    def locate(self, position_U: Tensor) -> tuple[Tensor, Tensor]:
        """Owners of positions of the path, and their rows counted through all the owner's stretches."""
        owner_U, row_U = torch.empty_like(position_U), torch.empty_like(position_U)
        first_AX = torch.tensor(self.first_rows, device=position_U.device)
        for index, (start, node) in enumerate(self.nodes):
            inside_U = (position_U >= start) & (position_U < start + node.num_tokens)
            owner, row = node.locate((position_U - start).clamp(0, node.num_tokens - 1))
            owner_U = torch.where(inside_U, owner, owner_U)
            row_U = torch.where(inside_U, first_AX[owner, index] + row, row_U)
        return owner_U, row_U

    def has_cotangents(self, owner_U: Tensor, row_U: Tensor) -> Tensor:
        """Which rows, counted through their owner's stretches, get any: all but those of constant extents."""
        first_AX = torch.tensor(self.first_rows, device=row_U.device)
        has_U = torch.ones_like(row_U, dtype=torch.bool)
        for index, extent in enumerate(self.earlier):
            if extent.constant:
                has_U &= (row_U < first_AX[owner_U, index]) | (row_U >= first_AX[owner_U, index + 1])
        return has_U


def select_streamed(
    q_TID: Tensor,
    weight_TI: Tensor,
    own_key_TD: Tensor,
    earlier: Sequence[DividedIndexKeys],
    *,
    setting: SelectedSetting,
    num_dense: int,
    topk: int,
) -> Tensor:
    """`select_positions` of this rank's queries over the whole path: int32 `[T, topk]` positions, ascending.

    The queries are those of this rank's tokens from the chunk's `num_dense`-th on, all of which see `topk` positions;
    `own_key_TD` are the index keys of all its tokens of the chunk. The result is that of one process.

    Collectives (kind "index_keys"), the same on every rank: an all-gather of the chunk's keys, and one per chunk of the
    path for each piece a rank's queries may be in: one under `block_cyclic`, two under `zigzag`.
    """
    exchange, split = setting.exchange, setting.split
    chunk_key_ND = gather_chunk(own_key_TD, split, exchange, dim=0, kind="index_keys")
    runs = gathered_index_runs(earlier, exchange, like_ND=own_key_TD)
    pieces = split.pieces_from(num_dense, exchange.rank)
    selected = [torch.empty(0, topk, dtype=torch.int32, device=q_TID.device)]
    at = 0
    for index in range(1 if split.order == "block_cyclic" else 2):
        if index < len(pieces):
            piece, mine = pieces[index], slice(at, at + len(pieces[index]))
            queries = IndexQueries(q_TID[mine], weight_TI[mine], setting.start + piece.begin)
            selected.append(select_positions(queries, [*runs, IndexRun(chunk_key_ND, setting.start)], topk=topk))
            at = mine.stop
        else:  # the others' passes over the path need this rank's keys
            for run in runs:
                for _ in run.staging.parts(run.passage()):
                    pass
    return torch.cat(selected)


def gathered_index_runs(earlier: Sequence[DividedIndexKeys], exchange: Exchange, *, like_ND: Tensor) -> list[IndexRun]:
    """Divided index keys as runs of whole extents, which are gathered chunk by chunk when a scan passes over them.

    Collective: all ranks pass over them, together. `like_ND` gives width, dtype and device on ranks that own none.
    """
    return [
        IndexRun(_nothing(each.node.num_tokens, like_ND), each.start, _GatheredKeys(each, like_ND, exchange))
        for each in earlier
        if each.node.num_tokens > 0
    ]


def attend_selected(
    q_HTW: Tensor, own_TW: Tensor, selected_TS: Tensor, setting: SelectedSetting, *, scale: float, value_width: int
) -> Tensor:
    """`SparseLatentAttention` of this rank's queries to selected rows of the whole path: `[H, T, V]`.

    `own_TW` are the rows of all this rank's tokens of the chunk, of which the queries may be some. Differentiable in q
    and own; the gradient of own is complete and includes `setting.d_own_TW`, earlier extents get theirs in place at
    their owner, all summed in float32. Every rank calls it, also one without queries, and pulls back through it.
    """
    position_U, inverse_TS = torch.unique(selected_TS.long(), return_inverse=True)
    rows_UW = _FetchedRows.apply(own_TW, position_U, setting)
    # The rows ascend with their positions, so a selection that ascends still does.
    keys = SelectedRows([], 0, inverse_TS.int(), scale, value_width)
    return SparseLatentAttention.apply(q_HTW, rows_UW, keys)


@dataclass(frozen=True, eq=False)
class _Requests:
    """Who asks whom for which rows, sorted by the rank that answers or asks."""

    order_U: Tensor  # the asked rows' order by owner
    returns_U: Tensor  # in that order: whether the row gets a cotangent
    num_by_owner: list[int]
    row_R: Tensor  # asked of this rank, counted through its stretches
    returns_R: Tensor
    num_by_asker: list[int]


class _FetchedRows(torch.autograd.Function):
    """Rows of the path by position, wide, each from its owner.

    Collectives: numbers and rows asked for ("requests") and the rows ("rows"); backward their cotangents
    ("row_cotangents").
    """

    @staticmethod
    def forward(ctx: Any, own_TW: Tensor, position_U: Tensor, setting: SelectedSetting) -> Tensor:
        requests = _ask(position_U, setting)
        found_RW = _read(requests.row_R, own_TW, setting)
        width = own_TW.shape[1]
        shapes = [(num, width) for num in requests.num_by_owner]
        arrived = setting.exchange.all_to_all(found_RW.split(requests.num_by_asker), shapes, kind="rows")
        rows_UW = own_TW.new_empty(len(position_U), width, dtype=wide_dtype(own_TW.dtype))
        rows_UW[requests.order_U] = torch.cat(arrived).to(rows_UW.dtype)
        ctx.own_dtype, ctx.num_own, ctx.requests, ctx.setting = own_TW.dtype, len(own_TW), requests, setting
        return rows_UW

    @staticmethod
    def backward(ctx: Any, d_rows_UW: Tensor) -> tuple[Tensor, None, None]:
        requests: _Requests = ctx.requests
        setting: SelectedSetting = ctx.setting
        width = d_rows_UW.shape[1]
        blocks = _some_of_each(d_rows_UW[requests.order_U], requests.returns_U, requests.num_by_owner)
        row_by_asker = _some_of_each(requests.row_R, requests.returns_R, requests.num_by_asker)
        shapes = [(len(row_R), width) for row_R in row_by_asker]
        shares = setting.exchange.all_to_all(blocks, shapes, kind="row_cotangents")
        d_own_TW = d_rows_UW.new_zeros(ctx.num_own, width)
        if setting.d_own_TW is not None:
            d_own_TW += setting.d_own_TW
        # One asker after the other: its rows all differ, so the order of the sums is fixed.
        for row_R, share_RW in zip(row_by_asker, shares, strict=True):
            _add(row_R, share_RW, d_own_TW, setting)
        return d_own_TW.to(ctx.own_dtype), None, None


def _ask(position_U: Tensor, setting: SelectedSetting) -> _Requests:
    exchange = setting.exchange
    owner_U, row_U = setting.locate(position_U)
    order_U = owner_U.argsort(stable=True)
    owner_U, row_U = owner_U[order_U], row_U[order_U]
    counts = torch.bincount(owner_U, minlength=exchange.degree)
    asked = exchange.all_to_all(list(counts.split(1)), [(1,)] * exchange.degree, kind="requests")
    num_by_owner, num_by_asker = counts.tolist(), torch.cat(asked).tolist()
    rows = exchange.all_to_all(row_U.split(num_by_owner), [(n,) for n in num_by_asker], kind="requests")
    row_R = torch.cat(rows)
    return _Requests(
        order_U,
        setting.has_cotangents(owner_U, row_U),
        num_by_owner,
        row_R,
        setting.has_cotangents(torch.full_like(row_R, exchange.rank), row_R),
        num_by_asker,
    )


def _some_of_each(x: Tensor, chosen: Tensor, sizes: list[int]) -> list[Tensor]:
    """The chosen rows of each block of so many."""
    return [block[some] for block, some in zip(x.split(sizes), chosen.split(sizes), strict=True)]


def _stretches(row_R: Tensor, setting: SelectedSetting) -> Iterator[tuple[DividedRows | None, Tensor, Tensor]]:
    """Where own rows lie: an extent (None: the chunk), which of the `[R]` lie there, and their rows in it."""
    firsts = setting.first_rows[setting.exchange.rank]
    for index, extent in enumerate([*setting.earlier, None]):
        where_R = ((row_R >= firsts[index]) & (row_R < firsts[index + 1])).nonzero()[:, 0]
        yield extent, where_R, row_R[where_R] - firsts[index]


def _read(row_R: Tensor, own_TW: Tensor, setting: SelectedSetting) -> Tensor:
    found_RW = own_TW.new_empty(len(row_R), own_TW.shape[1])
    for extent, where_R, local_R in _stretches(row_R, setting):
        if extent is None:
            found_RW[where_R] = own_TW.detach()[local_R]
        elif extent.mine is not None:
            found_RW[where_R] = extent.mine.staging.gather(extent.mine.key_NKD[:, 0], local_R)
    return found_RW


def _add(row_R: Tensor, share_RW: Tensor, d_own_TW: Tensor, setting: SelectedSetting) -> None:
    for extent, where_R, local_R in _stretches(row_R, setting):
        share = share_RW[where_R]
        if extent is None:
            d_own_TW.index_add_(0, local_R, share)
        elif extent.mine is not None and extent.mine.d_key_NKD is not None:
            sums = extent.mine.d_key_NKD[:, 0]
            extent.mine.staging.scatter_add(sums, local_R, share.to(sums.dtype))


@dataclass(frozen=True, eq=False)
class _GatheredKeys:
    """Reaches index keys that are divided over ranks: chunk by chunk, gathered in position order.

    A way to reach rows like any other (`Staging`), so the scan needs to know nothing of ranks. Collective: all ranks
    pass over the whole extent, together.
    """

    keys: DividedIndexKeys
    like_ND: Tensor
    exchange: Exchange

    def parts(self, passage: Passage) -> Iterator[tuple[int, Rows]]:
        node, rank, width = self.keys.node, self.exchange.rank, self.like_ND.shape[1]
        begin, at = 0, 0
        for index in range(node.num_chunks):
            split = node.chunk(index)
            mine = self.like_ND.new_empty(split.sizes[rank], width)
            if len(mine) > 0:
                assert self.keys.mine is not None, "the split says that this rank owns keys"
                rows = Rows((self.keys.mine.key_ND[at : at + len(mine)],))
                for _, part in self.keys.mine.staging.parts(Passage(rows, len(mine))):
                    mine.copy_(part.read[0])
            at += len(mine)
            blocks = self.exchange.all_gather_tokens(mine, split.sizes, dim=0, kind="index_keys")
            yield begin, Rows((in_position_order(blocks, split, dim=0),))
            begin += split.num_tokens

    def gather(self, rows_NW: Tensor, index_R: Tensor) -> Tensor:
        raise NotImplementedError("index keys are only passed over")

    def scatter_add(self, sums_NW: Tensor, index_R: Tensor, share_RW: Tensor) -> None:
        raise NotImplementedError("index keys have no cotangents")


def _nothing(num_rows: int, like_ND: Tensor) -> Tensor:
    """A tensor of so many rows without their memory: what stands for rows that are elsewhere."""
    return like_ND.new_empty(1, 1).expand(num_rows, like_ND.shape[1])
