"""The shared state of a path as new tokens see it while responses are sampled, on one rank or divided over several.

Every rank of a context axis runs every new token; only the path's state is divided. So each rank attends to what it
keeps, and the partial results are merged by their log-sum-exp (LSE), in rank order, the same everywhere.

Shape suffixes: G responses, H query heads, D head width, W width of a row of latents, V value width, N own tokens of a
response, S selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longstraw.execution.runner import Runner
from longstraw.execution.split_seams import divided_index_keys, divided_rows, owned_keys
from longstraw.ops.attention import NO_KEYS, KeyRun, attend_shared
from longstraw.ops.index_scan import IndexRun
from longstraw.ops.kernels import wide_dtype
from longstraw.ops.sparse_latent import attend_selected_per_row
from longstraw.parallel.context import OwnedKeys, merge_over_ranks
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.selected_rows import DividedIndexKeys, gathered_index_runs
from longstraw.parallel.streamed_rows import DividedRows
from longstraw.state.node import NodeState


class SharedKeys(Protocol):
    """Keys and values, or rows of latents, of a whole path."""

    def attend(self, q_HGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention to all of them: wide output `[H, G, D]` and LSE `[H, G]`."""
        ...

    def since(self, position: int) -> SharedKeys:
        """Those from a position on."""
        ...

    def attend_selected(
        self, q_GHW: Tensor, selected_GS: Tensor, own_GNW: Tensor, *, scale: float, value_width: int
    ) -> Tensor:
        """Attention of each response to its selected rows, some of which are its own: `[G, H, V]`."""
        ...


class SharedIndexKeys(Protocol):
    """Index keys of a whole path."""

    def runs(self, like_ND: Tensor) -> list[IndexRun]:
        """All of them in position order; `like_ND` has their width and dtype, on the device."""
        ...


@dataclass(frozen=True)
class WholeKeys:
    """All of them are here."""

    key_runs: list[KeyRun]

    def attend(self, q_HGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return attend_shared(q_HGD, self.key_runs, scale)

    def since(self, position: int) -> WholeKeys:
        seen = [run for run in self.key_runs if run.start + len(run) > position]
        return WholeKeys([run.cut(max(0, position - run.start), len(run)) for run in seen])

    def attend_selected(
        self, q_GHW: Tensor, selected_GS: Tensor, own_GNW: Tensor, *, scale: float, value_width: int
    ) -> Tensor:
        return attend_selected_per_row(q_GHW, selected_GS, self.key_runs, own_GNW, scale=scale, value_width=value_width)


@dataclass(frozen=True)
class WholeIndexKeys:
    """All of them are here."""

    index_runs: list[IndexRun]

    def runs(self, like_ND: Tensor) -> list[IndexRun]:
        return self.index_runs


@dataclass(frozen=True)
class DividedKeys:
    """Each rank keeps those of the tokens that it ran. Collective: all ranks attend, alike."""

    exchange: Exchange
    owned: list[OwnedKeys]

    def attend(self, q_HGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return merge_over_ranks(*attend_shared(q_HGD, [each.run for each in self.owned], scale), self.exchange)

    def since(self, position: int) -> DividedKeys:
        kept = []
        for each in self.owned:
            first = int(torch.searchsorted(each.position_N, position))
            if first < len(each.run):
                kept.append(OwnedKeys(each.run.cut(first, len(each.run)), each.position_N[first:]))
        return DividedKeys(self.exchange, kept)

    def attend_selected(
        self, q_GHW: Tensor, selected_GS: Tensor, own_GNW: Tensor, *, scale: float, value_width: int
    ) -> Tensor:
        raise NotImplementedError("keys and values are not selected")


@dataclass(frozen=True)
class DividedLatents:
    """The same of rows of latents."""

    exchange: Exchange
    rows: list[DividedRows]

    def attend(self, q_HGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        runs = [each.mine for each in self.rows if each.mine is not None]
        return merge_over_ranks(*attend_shared(q_HGD, runs, scale), self.exchange)

    def since(self, position: int) -> DividedLatents:
        raise NotImplementedError("latent layers have no window")

    def attend_selected(
        self, q_GHW: Tensor, selected_GS: Tensor, own_GNW: Tensor, *, scale: float, value_width: int
    ) -> Tensor:
        rows_GSW, is_here_GS = self._gather(selected_GS.long(), own_GNW)
        scores_GHS = (q_GHW @ rows_GSW.mT).to(wide_dtype(q_GHW.dtype)) * scale
        scores_GHS = scores_GHS.masked_fill(~is_here_GS[:, None], float("-inf"))
        lse_GH = scores_GHS.logsumexp(-1).clamp(min=NO_KEYS)
        weights_GHS = (scores_GHS - lse_GH[..., None]).exp()
        out_GHV = weights_GHS.to(q_GHW.dtype) @ rows_GSW[..., :value_width]
        return merge_over_ranks(out_GHV.to(lse_GH.dtype), lse_GH, self.exchange)[0].to(q_GHW.dtype)

    def _gather(self, selected_GS: Tensor, own_GNW: Tensor) -> tuple[Tensor, Tensor]:
        """Selected rows that this rank keeps, and which they are. A response's own, on every rank, are the first's."""
        end = self.rows[-1].start + self.rows[-1].node.num_tokens
        own_GS = (selected_GS - end).clamp(min=0)
        rows_GSW = own_GNW.gather(1, own_GS[..., None].expand(-1, -1, own_GNW.shape[-1]))
        is_here_GS = (selected_GS >= end) & (self.exchange.rank == 0)
        for each in self.rows:
            inside_GS = (selected_GS >= each.start) & (selected_GS < each.start + each.node.num_tokens)
            owner_GS, row_GS = each.node.locate((selected_GS - each.start).clamp(0, each.node.num_tokens - 1))
            mine_GS = inside_GS & (owner_GS == self.exchange.rank)
            if each.mine is not None:
                rows_GSW[mine_GS] = each.mine.staging.gather(each.mine.key_NKD[:, 0], row_GS[mine_GS])
            is_here_GS = is_here_GS | mine_GS
        return rows_GSW, is_here_GS


@dataclass(frozen=True)
class DividedIndexRuns:
    """Gathered from all ranks whenever a scan passes over them."""

    exchange: Exchange
    keys: list[DividedIndexKeys]

    def runs(self, like_ND: Tensor) -> list[IndexRun]:
        return gathered_index_runs(self.keys, self.exchange, like_ND=like_ND)


@dataclass(frozen=True)
class ReplicatedHeads:
    """A new token's DeltaNet layer: every rank has the token, works for its heads, and gathers the others'."""

    exchange: Exchange

    def to_heads(self, x_BTHD: Tensor) -> Tensor:
        return x_BTHD.chunk(self.exchange.degree, 2)[self.exchange.rank]

    def to_tokens(self, x_BTHD: Tensor) -> Tensor:
        sizes = [x_BTHD.shape[2]] * self.exchange.degree
        return torch.cat(self.exchange.all_gather_tokens(x_BTHD, sizes, dim=2, kind="heads"), 2)

    def own(self, x_H: Tensor) -> Tensor:
        return x_H.chunk(self.exchange.degree)[self.exchange.rank]


def shared_keys(run: Runner, node: NodeState, layer: int, window: int | None) -> SharedKeys:
    """The keys of the whole path."""
    if not run.is_divided:
        return WholeKeys(node.runs(layer))
    return DividedKeys(run.context, owned_keys(run, node, layer, None, with_positions=window is not None))


def shared_rows(run: Runner, node: NodeState, layer: int) -> SharedKeys:
    """The latents of the whole path."""
    if not run.is_divided:
        return WholeKeys(node.runs(layer))
    return DividedLatents(run.context, divided_rows(run, node, layer, None))


def shared_index_keys(run: Runner, node: NodeState, layer: int) -> SharedIndexKeys:
    """The index keys of the whole path."""
    if not run.is_divided:
        return WholeIndexKeys(node.index_runs(layer))
    return DividedIndexRuns(run.context, divided_index_keys(run, node, layer, None))
