"""Attention on the context axis by *sending queries*: they travel to the keys, which stay where they were computed.

The queries of a chunk are gathered, each rank attends over the keys it owns, and partial outputs return to be weighted
by the global log-sum-exp (LSE). Backward sends queries, outputs and their cotangents the same way; dQ returns, dK and
dV are complete where the keys are. Neither the traffic of a chunk nor its working memory grows with the path.

Earlier keys are visible to every query of a chunk, so their order does not matter. Within the chunk a rank's keys are
pieces: in position order the queries of a piece see it causally, all later ones see it whole, so no mask is made. Only
a window needs positions and masks.

Shape suffixes: H query heads, K key heads, T queries (of this rank where q is its own, of the chunk in position order
where gathered), N keys, D head width, R queries that see a key of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longstraw.ops.attention import KeyRun, add_own_cotangents, add_sinks, pull_sinks
from longstraw.ops.kernels import wide_dtype
from longstraw.ops.staging import Passage
from longstraw.parallel.arrange import by_rank, gather_chunk, of_rank
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, Piece
from longstraw.parallel.partials import Partial, Queries, merge_parts, with_cotangents

# Queries taken by one masked call of a sliding window.
QUERIES_PER_WINDOW_CALL = 1024


@dataclass(frozen=True, eq=False)
class OwnedKeys:
    """This rank's keys of one extent of the path: those of the tokens it ran. The run's start has no meaning."""

    run: KeyRun
    position_N: Tensor  # int64, ascending, on the CPU, where windows are cut; only read if there is a window


@dataclass(frozen=True, eq=False)
class SplitKeys:
    """The setting of one chunk in one layer on the context axis. Alike on all ranks but for `earlier` and `d_own_*`."""

    exchange: Exchange
    split: ChunkSplit
    earlier: Sequence[OwnedKeys]  # what this rank owns of the path before the chunk
    start: int  # position of the chunk's first token
    scale: float
    keys_per_backward_call: int
    window: int | None = None  # a query at p sees keys in (p - window, p]
    # Cotangents that later tokens sent to this rank's own keys and values of the chunk, float32 [T, K, D].
    d_own_key_TKD: Tensor | None = None
    d_own_value_TKD: Tensor | None = None
    known: tuple[Tensor, Tensor] | None = None  # output and LSE of an earlier forward: skips it and its collectives

    def cuts_off_keys(self) -> bool:
        """Whether the window hides any key of this rank from any later query. Decides local work only."""
        if self.window is None:
            return False
        oldest = min((int(keys.position_N[0]) for keys in self.earlier if len(keys.run) > 0), default=self.start)
        return self.start + self.split.num_tokens - oldest > self.window

    def own(self, k_KTD: Tensor, v_KTD: Tensor, *, cotangents: bool = False) -> OwnedKeys:
        """This rank's keys of the chunk itself, with zeroed cotangent buffers if asked for."""
        key, value = k_KTD.transpose(0, 1), v_KTD.transpose(0, 1)
        position_N = self.start + of_rank(torch.arange(self.split.num_tokens), self.split, self.exchange.rank, dim=0)
        return OwnedKeys(with_cotangents(key, value) if cotangents else KeyRun(key, value, self.start), position_N)

    def own_pieces(self, own: KeyRun) -> Iterator[tuple[Piece, KeyRun]]:
        """This rank's tokens of the chunk, piece by piece: where they stand in the chunk, and their keys."""
        at = 0
        for piece in self.split.pieces[self.exchange.rank]:
            yield piece, own.cut(at, at + len(piece))
            at += len(piece)


class SentQueries(torch.autograd.Function):
    """`(q_HTD, k_KTD, v_KTD, sinks_H | None, keys: SplitKeys) -> (out_HTD, lse_HT)` of this rank's tokens of a chunk.

    Equals one process: `ChunkAttention` of the whole chunk, of which each rank has its tokens in ascending order, none
    included. Differentiable in q, k, v and sinks. dK and dV are complete and include `d_own_*`; earlier extents get
    theirs in place. The gradient of sinks is the share of this rank's queries: sum it over the axis, once. Merges and
    sums are float32 at least. The LSE includes the sinks and is not differentiable; nor is any of it twice.

    Collectives: forward an all-gather (kind "queries") and an all-to-all ("partial_outputs"); backward two all-gathers
    ("query_cotangents") and an all-to-all ("partial_query_cotangents"). Every rank runs both.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, keys: SplitKeys
    ) -> tuple[Tensor, Tensor]:
        if keys.known is not None:
            out, lse = keys.known
        else:
            out, lse = _forward(q, k, v, keys)
            if sinks is not None:  # by the queries' rank, so once
                out, lse = add_sinks(out, lse, sinks)
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)  # type: ignore[arg-type]
        ctx.keys = replace(keys, known=None)  # type: ignore[attr-defined]  # a node that holds its output is never freed
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        keys: SplitKeys = ctx.keys
        dq, dk, dv = _backward(d_out, (q, k, v), out, lse, keys)
        add_own_cotangents(dk, dv, keys.d_own_key_TKD, keys.d_own_value_TKD)
        d_sinks = None if sinks is None else pull_sinks(sinks, d_out.to(dq.dtype), out, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None


def merge_over_ranks(out_HTD: Tensor, lse_HT: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Attention of queries that every rank has (of sampled tokens, say), from what each found over the keys it owns.

    Wide in and out, the same bits on all ranks. No gradient. One all-gather (kind "partial_outputs").
    """
    packed = torch.cat([out_HTD, lse_HT[..., None]], -1)
    sizes = [packed.shape[1]] * exchange.degree
    merged = merge_parts(exchange.all_gather_tokens(packed, sizes, dim=1, kind="partial_outputs"))
    return merged.out_HTD, merged.lse_HT


def _forward(q: Tensor, k: Tensor, v: Tensor, keys: SplitKeys) -> tuple[Tensor, Tensor]:
    """This rank's wide outputs and LSE, without sinks."""
    exchange, split = keys.exchange, keys.split
    q_all = gather_chunk(q, split, exchange, dim=1, kind="queries")
    partial = Partial.empty(q_all)
    own = keys.own(k, v)
    if keys.cuts_off_keys():
        for run, position_N in _visible([*keys.earlier, own], keys, sums=False):
            for rows_R, part, mask_RN in _window_blocks(position_N, keys, q.device):
                partial.see_part(q_all, rows_R, run.cut(part.start, part.stop), keys.scale, mask_RN=mask_RN)
    else:
        for owned in keys.earlier:
            partial.see(q_all, slice(None), owned.run, keys.scale)
        for piece, run in keys.own_pieces(own.run):
            partial.see_part(q_all, slice(piece.begin, piece.end), run, keys.scale)
            partial.see(q_all, slice(piece.end, None), run, keys.scale)
    packed = torch.cat([partial.out_HTD, partial.lse_HT[..., None]], -1)
    merged = merge_parts(exchange.send_back(by_rank(packed, split, dim=1), kind="partial_outputs"))
    return merged.out_HTD, merged.lse_HT


def _backward(
    d_out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, keys: SplitKeys
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide cotangents of this rank's queries, keys and values."""
    q, k, v = qkv
    exchange, split = keys.exchange, keys.split
    packed = gather_chunk(torch.cat([q, d_out, out], -1), split, exchange, dim=1, kind="query_cotangents")
    lse_all = gather_chunk(lse, split, exchange, dim=1, kind="query_cotangents")
    q_all, d_out_all, out_all = packed.split([x.shape[-1] for x in (q, d_out, out)], -1)
    queries = Queries(q_all, d_out_all, out_all, lse_all, torch.zeros_like(q_all, dtype=wide_dtype(q.dtype)))
    own = keys.own(k, v, cotangents=True)
    if keys.cuts_off_keys():
        for run, position_N in _visible([*keys.earlier, own], keys, sums=True):
            for rows_R, part, mask_RN in _window_blocks(position_N, keys, q.device):
                block = queries.at(rows_R)
                block.pull_part(run.cut(part.start, part.stop), keys.scale, mask_TN=mask_RN)
                queries.dq_HTD[:, rows_R] = block.dq_HTD
    else:
        for owned in keys.earlier:
            queries.pull(owned.run, keys.scale, keys_per_call=keys.keys_per_backward_call)
        for piece, run in keys.own_pieces(own.run):
            queries.at(slice(piece.begin, piece.end)).pull_part(run, keys.scale)
            queries.at(slice(piece.end, None)).pull(run, keys.scale, keys_per_call=keys.keys_per_backward_call)
    parts = exchange.send_back(by_rank(queries.dq_HTD, split, dim=1), kind="partial_query_cotangents")
    d_key, d_value = own.run.d_key_NKD, own.run.d_value_NKD
    assert d_key is not None and d_value is not None, "made with cotangents"
    return torch.stack(parts).sum(0), d_key.transpose(0, 1), d_value.transpose(0, 1)


def _visible(owned: Sequence[OwnedKeys], keys: SplitKeys, *, sums: bool) -> Iterator[tuple[KeyRun, Tensor]]:
    """Of each extent the keys that any query of the chunk sees, on the device, and their positions."""
    assert keys.window is not None, "only called for a window"
    for each in owned:
        first = int(torch.searchsorted(each.position_N, keys.start - keys.window + 1))
        if first < len(each.run):
            run = each.run.cut(first, len(each.run))
            for begin, part in run.staging.parts(Passage(run.rows(sums=sums), len(run))):
                yield run.over(begin, part), each.position_N[first:]


def _window_blocks(position_N: Tensor, keys: SplitKeys, device: torch.device) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Queries of the chunk that see any of these keys, block by block, the keys of the block, and the visible pairs."""
    assert keys.window is not None, "only called for a window"
    for begin in range(0, keys.split.num_tokens, QUERIES_PER_WINDOW_CALL):
        end = min(begin + QUERIES_PER_WINDOW_CALL, keys.split.num_tokens)
        query_T1 = torch.arange(keys.start + begin, keys.start + end)[:, None]
        bounds = torch.tensor([keys.start + begin - keys.window + 1, keys.start + end])
        first, last = torch.searchsorted(position_N, bounds).tolist()
        key_N = position_N[first:last]
        mask_TN = (key_N <= query_T1) & (key_N > query_T1 - keys.window)
        rows_R = mask_TN.any(1).nonzero()[:, 0]  # the kernels want a key in every row
        if len(rows_R) > 0:
            yield (begin + rows_R).to(device), slice(first, last), mask_TN[rows_R].to(device)
