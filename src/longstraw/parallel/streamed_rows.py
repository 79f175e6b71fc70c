"""Latent attention on the context axis by *streaming state*: rows travel past the queries, which stay.

A row of latents is far smaller than a token's queries in latent space, so the rows of every rank pass all others, slice
by slice, and each rank works for its own queries. Backward streams them again and sums each slice's cotangents at its
owner. Working memory is two slices: one in use, the next on its way.

Shape suffixes: H heads, T queries of this rank, C tokens of the chunk, N rows, W row width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longstraw.ops.attention import KeyRun
from longstraw.ops.kernels import wide_dtype
from longstraw.ops.staging import Passage, Rows
from longstraw.parallel.arrange import by_rank, gather_chunk
from longstraw.parallel.exchange import Arrival, Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit, Piece
from longstraw.parallel.partials import Partial, Queries


@dataclass(frozen=True, eq=False)
class DividedRows:
    """One extent of the path, divided over the axis. Alike on all ranks but for `mine`."""

    mine: KeyRun | None  # this rank's rows: one key head, whose value is the key; None if it owns none
    node: NodeSplit  # of the tokens in it: those of a whole node, or of its first chunks
    start: int  # position of the node's first token
    constant: bool  # nothing is pulled back: on all ranks alike, also where `mine` is None


@dataclass(frozen=True, eq=False)
class Slice:
    """Consecutive rows of one rank in one extent, arrived here."""

    extent: DividedRows
    owner: int
    begin: int
    end: int
    rows_NW: Tensor


@dataclass(frozen=True, eq=False)
class StreamSetting:
    """The setting of one chunk in one latent layer. Alike on all ranks but for `earlier`'s own rows and `d_own_TW`."""

    exchange: Exchange
    split: ChunkSplit
    earlier: Sequence[DividedRows]
    scale: float
    value_width: int  # the first numbers of a row are its value
    slice_rows: int
    num_dense: int  # how many of the chunk's first tokens attend to all rows: their queries are given
    d_own_TW: Tensor | None = None  # cotangents that later tokens sent to this rank's own rows, float32

    def own_pieces(self) -> Iterator[tuple[slice, Piece]]:
        """This rank's queries, piece by piece: which of its own they are, and where they stand in the chunk."""
        at = 0
        for piece in self.split.pieces_before(self.num_dense, self.exchange.rank):
            yield slice(at, at + len(piece)), piece
            at += len(piece)


class StreamedRows(torch.autograd.Function):
    """`(q_HTW, own_TW, setting) -> out_HTV`: every query attends to all rows of the path up to its own.

    Equals one process; each rank has its tokens in ascending order, none included, and of these the queries that are
    among the chunk's first `num_dense`. Differentiable in q and own. The gradient of own is complete and includes
    `d_own_TW`; earlier extents get theirs in place at their owner. Sums are float32 at least. Not differentiable twice.

    Collectives, the same on every rank: forward a broadcast per slice and an all-gather of the chunk's own rows (kind
    "rows"); backward these again, a reduction per slice that is not constant and an all-to-all ("row_cotangents").
    """

    @staticmethod
    def forward(ctx: Any, q_HTW: Tensor, own_TW: Tensor, setting: StreamSetting) -> Tensor:
        partial = Partial.empty(q_HTW)
        for passing in stream_rows(setting.earlier, own_TW, setting.exchange, slice_rows=setting.slice_rows):
            partial.see(q_HTW, slice(None), _run(passing.rows_NW), setting.scale)
        chunk_CW = gather_chunk(own_TW, setting.split, setting.exchange, dim=0, kind="rows")
        for mine, piece in setting.own_pieces():
            partial.see(q_HTW, mine, _run(chunk_CW[: piece.begin]), setting.scale)
            partial.see_part(q_HTW, mine, _run(chunk_CW[piece.begin : piece.end]), setting.scale)
        out_HTV = partial.out_HTD[..., : setting.value_width].to(q_HTW.dtype)
        ctx.save_for_backward(q_HTW, own_TW, out_HTV, partial.lse_HT)
        ctx.setting = setting
        return out_HTV

    @staticmethod
    def backward(ctx: Any, d_out_HTV: Tensor) -> tuple[Tensor, Tensor, None]:
        q_HTW, own_TW, out_HTV, lse_HT = ctx.saved_tensors
        setting: StreamSetting = ctx.setting
        exchange, split = setting.exchange, setting.split
        # The kernels' values are whole rows: what no output came from gets no cotangent.
        room = (0, q_HTW.shape[-1] - setting.value_width)
        d_out_HTW, out_HTW = functional.pad(d_out_HTV, room), functional.pad(out_HTV, room)
        dq_HTW = torch.zeros_like(q_HTW, dtype=wide_dtype(q_HTW.dtype))
        queries = Queries(q_HTW, d_out_HTW, out_HTW, lse_HT, dq_HTW)
        for passing in stream_rows(setting.earlier, own_TW, exchange, slice_rows=setting.slice_rows):
            d_rows_NW = torch.zeros_like(passing.rows_NW, dtype=dq_HTW.dtype)
            queries.pull(_run(passing.rows_NW, d_rows_NW), setting.scale, keys_per_call=setting.slice_rows)
            return_cotangents(passing, d_rows_NW, exchange)
        chunk_CW = gather_chunk(own_TW, split, exchange, dim=0, kind="rows")
        d_chunk_CW = torch.zeros_like(chunk_CW, dtype=dq_HTW.dtype)
        for mine, piece in setting.own_pieces():
            some, before = queries.at(mine), slice(piece.begin)
            some.pull(_run(chunk_CW[before], d_chunk_CW[before]), setting.scale, keys_per_call=setting.slice_rows)
            own = slice(piece.begin, piece.end)
            some.pull_part(_run(chunk_CW[own], d_chunk_CW[own]), setting.scale)
        parts = exchange.send_back(by_rank(d_chunk_CW, split, dim=0), kind="row_cotangents")
        d_own_TW = torch.stack(parts).sum(0)
        if setting.d_own_TW is not None:
            d_own_TW += setting.d_own_TW
        return dq_HTW.to(q_HTW.dtype), d_own_TW.to(own_TW.dtype), None


def stream_rows(
    extents: Sequence[DividedRows], like_NW: Tensor, exchange: Exchange, *, slice_rows: int, kind: str = "rows"
) -> Iterator[Slice]:
    """Every rank's rows of every extent, at most `slice_rows` at a time, in the same order on all ranks.

    Collective: a broadcast per slice, the next one under way while one is used, so all ranks go on to the end.
    `like_NW` gives width, dtype and device on ranks that own no rows.
    """
    ahead: tuple[Slice, Arrival] | None = None
    for extent in extents:
        for owner, num_rows in enumerate(extent.node.sizes):
            for begin in range(0, num_rows, slice_rows):
                end = min(begin + slice_rows, num_rows)
                rows_NW = like_NW.new_empty(end - begin, like_NW.shape[-1])
                if owner == exchange.rank:
                    _read(extent, begin, rows_NW)
                arrival = exchange.start_broadcast(rows_NW, owner, kind=kind)
                if ahead is not None:
                    ahead[1].wait()
                    yield ahead[0]
                ahead = Slice(extent, owner, begin, end, rows_NW), arrival
    if ahead is not None:
        ahead[1].wait()
        yield ahead[0]


def return_cotangents(passing: Slice, d_rows_NW: Tensor, exchange: Exchange) -> None:
    """Sum a slice's cotangents over ranks and add them where its rows live. Overwrites them; nothing if constant."""
    if passing.extent.constant:
        return
    total_NW = exchange.reduce_to_owner(d_rows_NW, passing.owner, kind="row_cotangents")
    if total_NW is not None:
        run = passing.extent.mine
        assert run is not None and run.d_key_NKD is not None, "an extent that is not constant has cotangents"
        sums = run.d_key_NKD[passing.begin : passing.end]
        for _, part in run.staging.parts(Passage(Rows((), (sums,)), len(sums))):
            part.sums[0].add_(total_NW[:, None])


def _read(extent: DividedRows, begin: int, into_NW: Tensor) -> None:
    """Copy own rows: what travels must stay as it is until it has arrived."""
    assert extent.mine is not None, "positions say that this rank owns rows"
    keys = extent.mine.key_NKD[begin : begin + len(into_NW)]
    for _, part in extent.mine.staging.parts(Passage(Rows((keys,)), len(keys))):
        into_NW.copy_(part.read[0][:, 0])


def _run(rows_NW: Tensor, d_rows_NW: Tensor | None = None) -> KeyRun:
    """Rows as one key head whose value is the key."""
    rows = rows_NW[:, None]
    d_rows = None if d_rows_NW is None else d_rows_NW[:, None]
    return KeyRun(rows, rows, 0, d_rows, d_rows)
