"""Which positions a sparse layer's queries attend to: the exact top-k of the index scores over the whole path.

Apart from the attention over them (`sparse_latent.py`), because one selection serves every layer that shares it. The
scan is the only work of a sparse layer that grows with the path. It meets the path in blocks and keeps a running best
of every query, `[T, S]` int64, so its working memory does not grow. No gradient: a choice is discrete.

A (query, position) pair is ranked by one int64: its score, made comparable as an integer, in the high half and the
complement of its position in the low half. All ranks of a query differ, so the best `topk` are one set, whatever the
order and size of the blocks; equal scores go to the lower position.

Shape suffixes: T queries, B queries of one block, G responses decoded together, I index heads, D index width,
N keys of the path (or of a strip of it), K tiles of a strip, C columns of a tile, M = B * I its rows, S selected
positions, H columns that hold a candidate, R candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longstraw.ops.staging import VIEWS, Passage, Rows, Staging


@dataclass(frozen=True)
class BlockSizes:
    """Working memory of the scan: a float32 tile `[M, C]`, then scores and ranks `[B, keys_per_strip]`."""

    keys_per_tile: int  # C
    tile_bytes: int  # decides B
    keys_per_strip: int  # keys scored before the running best is renewed; more for a large topk


# A CPU's tile is made and read while it is in the core's cache; a GPU wants few and large calls.
CPU_BLOCKS = BlockSizes(keys_per_tile=512, tile_bytes=2**20, keys_per_strip=8192)
GPU_BLOCKS = BlockSizes(keys_per_tile=1024, tile_bytes=2**26, keys_per_strip=16384)
# Renewing the best costs as much as ranking `topk` keys, so a strip has at least this many times as many.
STRIP_KEYS_PER_SELECTED = 8
# Picking out more than this share of a strip's scores costs more than taking them all.
MAX_CANDIDATE_SHARE = 0.25

_LOW_HALF = 2**32 - 1
_NEVER = torch.iinfo(torch.int64).min


@dataclass(frozen=True, eq=False)
class IndexRun:
    """Consecutive index keys of the path, in the model's dtype."""

    key_ND: Tensor
    start: int  # position in the sequence of the first key
    staging: Staging = VIEWS  # how to reach them from the device

    def __len__(self) -> int:
        return self.key_ND.shape[0]

    def passage(self) -> Passage:
        """How a scan passes over them. A piece is a tile; how many make a part changes nothing."""
        return Passage(Rows((self.key_ND,)), _sizes(self.key_ND.device).keys_per_tile)


@dataclass(frozen=True, eq=False)
class IndexQueries:
    """Consecutive index queries. Query t stands at position `start + t` and sees it and every earlier one."""

    q_TID: Tensor  # rotated, in the model's dtype
    weight_TI: Tensor  # float32, of either sign; every constant factor of the score is in it
    start: int


@torch.no_grad()
def select_positions(queries: IndexQueries, runs: Sequence[IndexRun], *, topk: int) -> Tensor:
    """The `topk` visible positions with the highest `sum_i weight[t, i] * relu(q[t, i] . k[n])`: int32 `[T, topk]`.

    Rows ascend. Products and sums are float32; equal scores go to the lower position, a NaN loses to every number.
    The runs are contiguous from position 0 to the last query's or beyond, and every query sees at least `topk`
    positions. No gradient.

    The result does not depend on how the path is cut into runs nor the queries into calls. Where scores are not exact
    this rests on the library rounding a tile's scores alike at every number of rows; on a CPU it does from 8 index
    heads on, with fewer heads (and on a GPU) scores that agree to the last bit or so may change places.
    """
    num_queries = queries.q_TID.shape[0]
    _check_path(runs, queries.start + num_queries)
    assert queries.start + 1 >= topk, f"a query at {queries.start} does not see {topk} positions"
    scorer = _Scorer(queries.q_TID, topk)
    best_of_blocks = _scan(scorer, scorer.blocks(queries), runs, topk=topk)
    return torch.cat([_positions(best_BS) for best_BS in best_of_blocks])


@torch.no_grad()
def select_positions_per_row(queries: IndexQueries, runs: Sequence[IndexRun], own_GND: Tensor, *, topk: int) -> Tensor:
    """`select_positions` of G queries that all stand at `queries.start`, one of each response: int32 `[G, topk]`.

    Row g sees every key of the shared runs and, from the position where they end, its own keys `own_GND[g]` up to the
    query's position.
    """
    num_shared = _check_path(runs, 0)
    num_own = queries.start + 1 - num_shared
    assert 0 <= num_own <= own_GND.shape[1], f"{own_GND.shape[1]} own keys from {num_shared} do not reach the query"
    assert queries.start + 1 >= topk, f"a query at {queries.start} does not see {topk} positions"
    scorer = _Scorer(queries.q_TID, topk)
    # To the shared runs they are like queries right behind them.
    blocks = [replace(block, start=num_shared) for block in scorer.blocks(queries)]
    best_of_blocks = _scan(scorer, blocks, runs, topk=topk)
    own_of_blocks = own_GND[:, :num_own].split(scorer.queries_per_block)
    for index, (block, own_BND) in enumerate(zip(blocks, own_of_blocks, strict=True)):
        for at in range(0, num_own, scorer.keys_per_strip):
            key_BND, start = own_BND[:, at : at + scorer.keys_per_strip], num_shared + at
            scores_KBC = scorer.score_own(block, key_BND, start)
            best_of_blocks[index] = _renew(best_of_blocks[index], scores_KBC, start, key_BND.shape[1], topk=topk)
    return torch.cat([_positions(best_BS) for best_BS in best_of_blocks])


def select_positions_naive(queries: IndexQueries, runs: Sequence[IndexRun], *, topk: int) -> Tensor:
    """Oracle of `select_positions`: every score at once and a stable sort."""
    key_ND = torch.cat([run.key_ND for run in runs]).float()
    products_TIN = (queries.q_TID.float() @ key_ND.T).relu()
    scores_TN = torch.einsum("ti,tin->tn", queries.weight_TI, products_TIN)
    query_T1 = torch.arange(queries.start, queries.start + len(scores_TN), device=key_ND.device)[:, None]
    later_TN = torch.arange(len(key_ND), device=key_ND.device) > query_T1
    order_TN = scores_TN.masked_fill(later_TN, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    return order_TN[:, :topk].sort(1).values.int()


class _Scorer:
    """Index scores of one block of queries and one strip of keys, made tile by tile in one buffer.

    Every tile has all its columns; a strip's last one is filled up with whatever the buffer holds. For how a library
    rounds the sum of one product depends on the number of columns, and so would the selection on how the path is cut.
    """

    def __init__(self, q_TID: Tensor, topk: int) -> None:
        sizes = _sizes(q_TID.device)
        num_heads, width = q_TID.shape[1:]
        self.keys_per_strip = _round_up(max(sizes.keys_per_strip, STRIP_KEYS_PER_SELECTED * topk), sizes.keys_per_tile)
        self.queries_per_block = max(1, sizes.tile_bytes // (4 * num_heads * sizes.keys_per_tile))
        # A GPU multiplies half precision into float32, which gives the same products as float32 operands.
        half = q_TID.device.type == "cuda" and q_TID.dtype in (torch.bfloat16, torch.float16)
        self._key_CD = q_TID.new_zeros(sizes.keys_per_tile, width, dtype=q_TID.dtype if half else torch.float32)
        num_rows = min(self.queries_per_block, q_TID.shape[0]) * num_heads
        self._tile_MC = self._key_CD.new_empty(num_rows, sizes.keys_per_tile, dtype=torch.float32)

    def blocks(self, queries: IndexQueries) -> list[IndexQueries]:
        """The queries, as many at a time as a tile takes."""
        size = self.queries_per_block
        return [
            IndexQueries(queries.q_TID[at : at + size], queries.weight_TI[at : at + size], queries.start + at)
            for at in range(0, len(queries.q_TID), size)
        ]

    def score(self, queries: IndexQueries, keys: IndexRun) -> Tensor:
        """float32 `[K, B, C]`: score `[k, :, c]` is of key `k * C + c`. Later keys than the query's have -inf."""
        q_MD = queries.q_TID.to(self._key_CD.dtype).flatten(0, 1)
        tile_MC = self._tile_MC[: len(q_MD)]
        scores_KBC = self._room(queries, len(keys))
        for tile, begin in enumerate(range(0, len(keys), self._key_CD.shape[0])):
            key_CD = keys.key_ND[begin : begin + self._key_CD.shape[0]]
            if key_CD.shape != self._key_CD.shape or key_CD.dtype != self._key_CD.dtype:
                self._key_CD[: len(key_CD)] = key_CD
                key_CD = self._key_CD
            _multiply(q_MD, key_CD.T, tile_MC)
            _add_heads(queries, tile_MC, scores_KBC[tile])
        return _hide_later(scores_KBC, queries, keys)

    def score_own(self, queries: IndexQueries, key_BND: Tensor, start: int) -> Tensor:
        """`score` of queries that have keys of their own, and see all of them."""
        num_queries, num_keys, width = key_BND.shape
        scores_KBC = self._room(queries, num_keys)
        q_BID = queries.q_TID.float()
        key_BCD = q_BID.new_zeros(num_queries, self._key_CD.shape[0], width)
        for tile, begin in enumerate(range(0, num_keys, key_BCD.shape[1])):
            end = min(begin + key_BCD.shape[1], num_keys)
            key_BCD[:, : end - begin] = key_BND[:, begin:end]
            _add_heads(queries, torch.bmm(q_BID, key_BCD.mT), scores_KBC[tile])
        last = IndexQueries(queries.q_TID, queries.weight_TI, start + num_keys)
        return _hide_later(scores_KBC, last, IndexRun(key_BND[0], start))

    def _room(self, queries: IndexQueries, num_keys: int) -> Tensor:
        num_columns = self._tile_MC.shape[1]
        num_tiles = _round_up(num_keys, num_columns) // num_columns
        return self._tile_MC.new_empty(num_tiles, queries.q_TID.shape[0], num_columns)


def _add_heads(queries: IndexQueries, products_MC: Tensor, scores_BC: Tensor) -> None:
    products_BIC = products_MC.relu_().view(*queries.weight_TI.shape, -1)
    torch.bmm(queries.weight_TI[:, None], products_BIC, out=scores_BC[:, None])


def _hide_later(scores_KBC: Tensor, queries: IndexQueries, keys: IndexRun) -> Tensor:
    """Scores of -inf, in place, for keys later than the query and for the columns behind the last key."""
    num_tiles, num_queries, num_columns = scores_KBC.shape
    if len(keys) < num_tiles * num_columns or keys.start + len(keys) - 1 > queries.start:
        query_B1 = torch.arange(queries.start, queries.start + num_queries, device=scores_KBC.device)[:, None]
        key_K1C = torch.arange(num_tiles * num_columns, device=scores_KBC.device).view(num_tiles, 1, num_columns)
        last_B1 = (query_B1 - keys.start).clamp(max=len(keys) - 1)
        scores_KBC.masked_fill_(key_K1C > last_B1, float("-inf"))
    return scores_KBC


def _multiply(q_MD: Tensor, key_DN: Tensor, out_MN: Tensor) -> None:
    """Products in float32, of half precision operands too."""
    if q_MD.dtype == torch.float32:
        torch.mm(q_MD, key_DN, out=out_MN)
    else:
        torch.mm(q_MD, key_DN, out_dtype=torch.float32, out=out_MN)


def _scan(scorer: _Scorer, blocks: list[IndexQueries], runs: Sequence[IndexRun], *, topk: int) -> list[Tensor]:
    """The best ranks `[B, topk]` of each block, unordered. Blocks take turns, so that every key is fetched once."""
    best = [torch.empty(len(block.q_TID), 0, dtype=torch.int64, device=block.q_TID.device) for block in blocks]
    for run in runs:
        for begin, part in run.staging.parts(run.passage()):
            keys = IndexRun(part.read[0], run.start + begin)
            for index, block in enumerate(blocks):
                for strip in _strips(keys, block.start + len(block.q_TID), scorer.keys_per_strip):
                    scores_KBC = scorer.score(block, strip)
                    best[index] = _renew(best[index], scores_KBC, strip.start, len(strip), topk=topk)
    return best


def _renew(best_BS: Tensor, scores_KBC: Tensor, start: int, num_keys: int, *, topk: int) -> Tensor:
    """The best of what was best and of keys that all come later.

    They come later, so one of them enters only if its score is strictly higher than the worst of a full best: few do
    once the path is long, and only those are ranked.
    """
    candidates = _candidates(scores_KBC, _scores(best_BS.amin(1))) if best_BS.shape[1] == topk else None
    if candidates is None:
        scores_BN = scores_KBC.transpose(0, 1).flatten(1)[:, :num_keys]
        new_ranks = _ranks(scores_BN, torch.arange(start, start + num_keys, device=scores_BN.device))
    else:
        row_R, tile_R, column_R = candidates
        if len(row_R) == 0:
            return best_BS
        position_R = start + tile_R * scores_KBC.shape[2] + column_R
        new_ranks = _by_row(_ranks(scores_KBC[tile_R, row_R, column_R], position_R), row_R, len(best_BS))
    ranks = torch.cat([best_BS, new_ranks], 1)
    return ranks.topk(min(topk, ranks.shape[1]), sorted=False).values


def _candidates(scores_KBC: Tensor, worst_B: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows (ascending), tiles and columns of the scores above their row's worst; None if they are not few."""
    # Most columns hold none late in a long path, and reading the highest of a column's tiles is all it takes to see it.
    # The negation lets a NaN hide nothing.
    row_H, column_H = (~(scores_KBC.amax(0) <= worst_B[:, None])).nonzero(as_tuple=True)
    if len(row_H) * scores_KBC.shape[0] <= MAX_CANDIDATE_SHARE * scores_KBC.numel():
        score_HK = scores_KBC[:, row_H, column_H].T
        hot_R, tile_R = (score_HK > worst_B[row_H, None]).nonzero(as_tuple=True)
        return row_H[hot_R], tile_R, column_H[hot_R]
    is_candidate_KBC = scores_KBC > worst_B[:, None]
    if int(is_candidate_KBC.sum()) > MAX_CANDIDATE_SHARE * scores_KBC.numel():
        return None
    row_R, tile_R, column_R = is_candidate_KBC.transpose(0, 1).nonzero(as_tuple=True)
    return row_R, tile_R, column_R


def _by_row(rank_R: Tensor, row_R: Tensor, num_rows: int) -> Tensor:
    """Ranks of ascending rows as a matrix, filled up with the least rank."""
    num_in_row_B = torch.bincount(row_R, minlength=num_rows)
    first_B = num_in_row_B.cumsum(0) - num_in_row_B
    ranks = torch.full((num_rows, int(num_in_row_B.max())), _NEVER, device=rank_R.device)
    ranks[row_R, torch.arange(len(row_R), device=row_R.device) - first_B[row_R]] = rank_R
    return ranks


def _ranks(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 that order by score, equal scores by lower position. -0.0 equals 0.0, and NaN the lowest score.

    Positions that a query does not see have the lowest score and are later than all it sees, so they lose to those.
    """
    bits = (scores.nan_to_num(float("-inf"), float("inf"), float("-inf")) + 0.0).view(torch.int32)
    return (_ordered(bits).long() << 32).add_(_LOW_HALF - positions)


def _scores(ranks: Tensor) -> Tensor:
    return _ordered((ranks >> 32).int()).view(torch.float32)


def _positions(best_BS: Tensor) -> Tensor:
    """int32, ascending."""
    return (_LOW_HALF - (best_BS & _LOW_HALF)).sort(1).values.int()


def _ordered(bits: Tensor) -> Tensor:
    """Bits of float32 as int32 that order alike: a negative number's magnitude is flipped. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _strips(run: IndexRun, num_visible: int, num_keys: int) -> Iterator[IndexRun]:
    for begin in range(0, min(len(run), num_visible - run.start), num_keys):
        end = min(begin + num_keys, len(run), num_visible - run.start)
        yield IndexRun(run.key_ND[begin:end], run.start + begin)


def _sizes(device: torch.device) -> BlockSizes:
    return GPU_BLOCKS if device.type == "cuda" else CPU_BLOCKS


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _check_path(runs: Sequence[IndexRun], num_positions: int) -> int:
    """The number of positions in the runs, which must be contiguous from 0 and at least as many as asked for."""
    end = 0
    for run in runs:
        assert run.start == end, f"a run starts at position {run.start}, the one before ends at {end}"
        end += len(run)
    assert end >= num_positions, f"the runs end at position {end}, the queries at {num_positions}"
    return end
