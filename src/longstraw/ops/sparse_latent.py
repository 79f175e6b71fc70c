"""Attention of queries to selected rows of latent state, in query blocks of bounded memory.

Latent state is one row per token: a latent, which is also the value, and a rotated key that all heads share. A query
mapped into latent space has a row's width, so all heads of a query attend to the same few rows, and the heads are the
query axis of every product. Selected rows are gathered from wherever they lie, a block of queries at a time; nothing
the size of the path is made. The forward keeps output and log-sum-exp (LSE); the backward adds the cotangents of the
rows in place into the extents' buffers.

Shape suffixes: H heads, T queries, B queries of one block, G responses decoded together, N rows, S selected positions,
R gathered rows, W row width, V value width, X twice the heads: once for the output's cotangent, once for the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.ops.attention import KeyRun
from longstraw.ops.kernels import wide_dtype
from longstraw.ops.staging import VIEWS, Staging

# Rows, scores and their cotangents of one block of queries; on a CPU small enough to stay in its caches.
CPU_BLOCK_BYTES = 4 * 2**20
GPU_BLOCK_BYTES = 512 * 2**20


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """The setting of a chunk's queries in one layer: the rows they attend to, and what those get back."""

    earlier: Sequence[KeyRun]  # oldest first, contiguous up to the chunk; one key head, whose value is the key
    start: int  # position of the chunk's first token, which is own row 0
    selected_TS: Tensor  # int32, each query's positions, different and ascending
    scale: float
    value_width: int  # the first numbers of a row are its value
    d_own_NW: Tensor | None = None  # cotangents that later tokens sent to the chunk's own rows, float32


class SparseLatentAttention(torch.autograd.Function):
    """`(q_HTW, own_NW, keys) -> out_HTV`: each query attends to its selected rows. Differentiable in q and own.

    The queries are the last T of the chunk's N tokens, and all rows of a selection are visible to its query. Output and
    gradients have the inputs' dtype; scores, softmax and sums are float32 (float64 for a float64 model). Earlier
    extents get their cotangents in place, constant ones cost nothing. The gradient of own includes `keys.d_own_NW`,
    added in float32 before the one rounding. Not differentiable twice.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q_HTW: Tensor, own_NW: Tensor, keys: SelectedRows) -> Tensor:
        num_heads, num_queries, _ = q_HTW.shape
        out_HTV = q_HTW.new_empty(num_heads, num_queries, keys.value_width)
        lse_HT = torch.empty(num_heads, num_queries, dtype=wide_dtype(q_HTW.dtype), device=q_HTW.device)
        sources = _sources(keys, own_NW)
        for begin, end in _blocks(q_HTW, keys.selected_TS.shape[1]):
            rows_BSW = _gather(sources, keys.selected_TS[begin:end], _operand_dtype(q_HTW))
            q_BHW = q_HTW[:, begin:end].transpose(0, 1)
            out_BHV, lse_BH = _attend(q_BHW, rows_BSW, keys.scale, keys.value_width)
            out_HTV[:, begin:end], lse_HT[:, begin:end] = out_BHV.transpose(0, 1), lse_BH.T
        ctx.save_for_backward(q_HTW, own_NW, out_HTV, lse_HT)
        ctx.keys = keys  # type: ignore[attr-defined]
        return out_HTV

    @staticmethod
    def backward(ctx, d_out_HTV: Tensor):  # type: ignore[no-untyped-def]
        q_HTW, own_NW, out_HTV, lse_HT = ctx.saved_tensors
        keys: SelectedRows = ctx.keys
        wide = lse_HT.dtype
        dq_HTW = torch.empty_like(q_HTW)
        if keys.d_own_NW is None:
            d_own_NW = torch.zeros(own_NW.shape, dtype=wide, device=own_NW.device)
        else:
            d_own_NW = keys.d_own_NW.to(wide, copy=True)
        sources = _sources(keys, own_NW, d_own_NW)
        for begin, end in _blocks(q_HTW, keys.selected_TS.shape[1]):
            selected_BS = keys.selected_TS[begin:end]
            rows_BSW = _gather(sources, selected_BS, _operand_dtype(q_HTW))
            q, d_out, out, lse = (x[:, begin:end].transpose(0, 1) for x in (q_HTW, d_out_HTV, out_HTV, lse_HT))
            dq_BHW, d_rows_BSW = _attend_backward(q, d_out, out, lse, rows_BSW, keys.scale)
            dq_HTW[:, begin:end] = dq_BHW.transpose(0, 1)
            _scatter(sources, selected_BS, d_rows_BSW)
        return dq_HTW, d_own_NW.to(own_NW.dtype), None


@torch.no_grad()
def attend_selected_per_row(
    q_GHW: Tensor, selected_GS: Tensor, runs: Sequence[KeyRun], own_GNW: Tensor, *, scale: float, value_width: int
) -> Tensor:
    """Attention of one query of each of G responses to its selected rows: `[G, H, V]` in the queries' dtype.

    Row g's positions lie in the shared runs or, from the position where these end, in its own rows `own_GNW[g]`.
    No gradient.
    """
    num_shared = runs[-1].start + len(runs[-1]) if runs else 0
    out_GHV = q_GHW.new_empty(*q_GHW.shape[:2], value_width)
    num_own = own_GNW.shape[1]
    for begin, end in _blocks(q_GHW.transpose(0, 1), selected_GS.shape[1]):
        # The block's own rows in one line behind the shared ones: row g's begin g * num_own later.
        shift_B1 = torch.arange(end - begin, device=selected_GS.device)[:, None] * num_own
        selected_BS = selected_GS[begin:end].long()
        selected_BS = torch.where(selected_BS < num_shared, selected_BS, selected_BS + shift_B1)
        sources = [*map(_source, runs), _Source(own_GNW[begin:end].flatten(0, 1), num_shared, None)]
        rows_BSW = _gather(sources, selected_BS, _operand_dtype(q_GHW))
        out_GHV[begin:end], _ = _attend(q_GHW[begin:end], rows_BSW, scale, value_width)
    return out_GHV


def sparse_latent_attention_naive(q_HTW: Tensor, own_NW: Tensor, keys: SelectedRows) -> Tensor:
    """Oracle of `SparseLatentAttention`: the concatenated path and autograd. `d_own_NW` is left to the caller."""
    path_NW = torch.cat([*(run.key_NKD[:, 0] for run in keys.earlier), own_NW])
    rows_TSW = path_NW[keys.selected_TS.long()]
    scores_HTS = torch.einsum("htw,tsw->hts", q_HTW, rows_TSW) * keys.scale
    return torch.einsum("hts,tsv->htv", scores_HTS.softmax(-1), rows_TSW[..., : keys.value_width])


@dataclass(frozen=True, eq=False)
class _Source:
    """Consecutive rows of the path."""

    row_NW: Tensor
    start: int
    d_row_NW: Tensor | None
    staging: Staging = VIEWS


def _source(run: KeyRun) -> _Source:
    d_row_NW = None if run.d_key_NKD is None else run.d_key_NKD[:, 0]
    return _Source(run.key_NKD[:, 0], run.start, d_row_NW, run.staging)


def _sources(keys: SelectedRows, own_NW: Tensor, d_own_NW: Tensor | None = None) -> list[_Source]:
    """The path of a chunk, oldest first."""
    end = keys.earlier[0].start if keys.earlier else keys.start
    for run in keys.earlier:
        assert run.start == end, f"a run starts at position {run.start}, the one before ends at {end}"
        end += len(run)
    assert end == keys.start, f"the runs end at position {end}, the chunk starts at {keys.start}"
    return [*map(_source, keys.earlier), _Source(own_NW, keys.start, d_own_NW)]


def _operand_dtype(q: Tensor) -> torch.dtype:
    """What products take. A GPU multiplies half precision into float32; elsewhere operands are widened first."""
    return q.dtype if q.device.type == "cuda" else wide_dtype(q.dtype)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Batched product in wide precision, of half precision operands too."""
    wide = wide_dtype(right.dtype)
    if right.dtype == wide:
        return torch.bmm(left.to(wide), right)
    return torch.bmm(left.to(right.dtype), right, out_dtype=wide)


def _blocks(q_HTW: Tensor, num_selected: int) -> Iterator[tuple[int, int]]:
    num_heads, num_queries, width = q_HTW.shape
    limit = GPU_BLOCK_BYTES if q_HTW.device.type == "cuda" else CPU_BLOCK_BYTES
    # Per selected row: two gathered copies or one and its cotangent, and two numbers of every head.
    bytes_per_query = num_selected * 4 * (2 * width + 2 * num_heads)
    num = max(1, limit // bytes_per_query)
    for begin in range(0, num_queries, num):
        yield begin, min(begin + num, num_queries)


def _located(sources: Sequence[_Source], selected_BS: Tensor) -> Iterator[tuple[_Source, Tensor | None, Tensor]]:
    """Where a block's rows lie: a source, which of the `[B * S]` selected lie there (None: all), their rows in it."""
    position_R = selected_BS.reshape(-1).long()
    num_left = len(position_R)
    for source in reversed(sources):
        if num_left == 0:
            return
        row_R = position_R - source.start
        where_R = ((row_R >= 0) & (row_R < len(source.row_NW))).nonzero()[:, 0]
        num_left -= len(where_R)
        if len(where_R) == len(position_R):
            yield source, None, row_R
        elif len(where_R) > 0:
            yield source, where_R, row_R[where_R]
    assert num_left == 0, f"{num_left} selected positions lie outside the path"


def _gather(sources: Sequence[_Source], selected_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, S, W]`."""
    found, places = [], []
    for source, where_R, row_R in _located(sources, selected_BS):
        found.append(source.staging.gather(source.row_NW, row_R))
        places.append(where_R)
    row_RW = found[0]
    if len(found) > 1:
        # Reading the rows in order is several times as fast as writing each source's to their places.
        place_R = torch.cat([where_R for where_R in places if where_R is not None])
        order_R = torch.empty_like(place_R).scatter_(0, place_R, torch.arange(len(place_R), device=place_R.device))
        row_RW = torch.cat(found).index_select(0, order_R)
    return row_RW.to(dtype).view(*selected_BS.shape, -1)


def _scatter(sources: Sequence[_Source], selected_BS: Tensor, d_rows_BSW: Tensor) -> None:
    """Add the cotangents of gathered rows to their owners."""
    d_rows_RW = d_rows_BSW.flatten(0, 1)
    for source, where_R, row_R in _located(sources, selected_BS):
        if source.d_row_NW is not None:
            share = d_rows_RW if where_R is None else d_rows_RW.index_select(0, where_R)
            source.staging.scatter_add(source.d_row_NW, row_R, share.to(source.d_row_NW.dtype))


def _attend(q_BHW: Tensor, rows_BSW: Tensor, scale: float, value_width: int) -> tuple[Tensor, Tensor]:
    """Wide output `[B, H, V]` and LSE `[B, H]`."""
    scores_BHS = _multiply(q_BHW, rows_BSW.mT).mul_(scale)
    lse_BH = scores_BHS.logsumexp(-1)
    p_BHS = scores_BHS.sub_(lse_BH[..., None]).exp_()
    return _multiply(p_BHS, rows_BSW[..., :value_width]), lse_BH


def _attend_backward(
    q_BHW: Tensor, d_out_BHV: Tensor, out_BHV: Tensor, lse_BH: Tensor, rows_BSW: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Wide cotangents of the queries `[B, H, W]` and of the rows `[B, S, W]`.

    A row is key and value at once, so the products of both come as one, over queries and output cotangents side by
    side: those with the rows are scores and cotangents of the weights, those back onto the rows its two roles' shares.
    """
    num_heads, width = q_BHW.shape[1:]
    wide = lse_BH.dtype
    d_value_BHW = torch.nn.functional.pad(d_out_BHV.to(rows_BSW.dtype), (0, width - d_out_BHV.shape[-1]))
    q_BHW = q_BHW.to(rows_BSW.dtype)
    products_BXS = _multiply(torch.cat([d_value_BHW, q_BHW], 1), rows_BSW.mT)
    d_scores_BHS, p_BHS = products_BXS[:, :num_heads], products_BXS[:, num_heads:]  # turned into these in place
    p_BHS.mul_(scale).sub_(lse_BH[..., None]).exp_()
    delta_BH1 = (d_out_BHV.to(wide) * out_BHV.to(wide)).sum(-1, keepdim=True)
    d_scores_BHS.sub_(delta_BH1).mul_(p_BHS).mul_(scale)
    products_BXS = products_BXS.to(rows_BSW.dtype)
    dq_BHW = _multiply(products_BXS[:, :num_heads], rows_BSW)
    return dq_BHW, _multiply(products_BXS.mT, torch.cat([q_BHW, d_value_BHW], 1))
