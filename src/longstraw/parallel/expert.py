"""Tokens to their experts and back: routed experts whose parameters are divided over the ranks of the expert axis.

Rank r has the r-th of `degree` equal ranges of a layer's experts. A token's row travels once to every rank that has
one of its experts, whatever their number there, with the choices and weights that concern that rank; the rank returns
one row, its experts' weighted sum. All ranks of the axis make these calls for every layer they run, also those whose
experts got nothing: an all-to-all has no absentees, in backward as little as in forward.

Shape suffixes: N tokens of this rank, K experts a token takes, C choices (a token and an expert of it), R rows that
travel, E hidden size. Choices and rows are those of the sender or of the receiver, as the text says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longstraw.ops.kernels import wide_dtype
from longstraw.parallel.exchange import Exchange

KIND = "experts"
# Rows `[C, E]`, their experts `[C, 1]` counted from this rank's first, weights `[C, 1]`; weighted outputs `[C, E]`.
LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


def run_experts(
    hidden_NE: Tensor,
    choice_NK: Tensor,
    weight_NK: Tensor,
    experts: LocalExperts,
    *,
    num_local_experts: int,
    exchange: Exchange,
) -> Tensor:
    """The weighted sum `[N, E]` of every token's experts, wherever they are.

    `choice_NK` are expert numbers of the whole layer. Differentiable in hidden states and weights, and through
    `experts` in its parameters. The order of all sums follows from the choices alone, so a repeated forward has the
    same bits. Collectives: one all-to-all of counts, one of choices, then two each way (rows, weights) in forward
    and backward; with autograd on, backward must run on all ranks.
    """
    route = _plan(choice_NK, num_local_experts, exchange)
    weight_C = weight_NK.reshape(-1)[route.choice_C]
    # Requires grad on every rank, so that no rank's backward ends before its all-to-all.
    anchor = torch.zeros((), device=hidden_NE.device, requires_grad=torch.is_grad_enabled())
    rows_RE, weight_C = _ToExperts.apply(hidden_NE[route.token_R], weight_C, anchor, route, exchange)
    if route.num_received_choices > 0:
        out_CE = experts(rows_RE[route.row_C], route.expert_C[:, None], weight_C[:, None])
        rows_RE = _sum_runs(out_CE, route.choices_of_row_R).to(hidden_NE.dtype)
    returned_RE = _FromExperts.apply(rows_RE, route, exchange)
    return _sum_runs(returned_RE[route.by_token_R], route.rows_of_token_N).to(hidden_NE.dtype)


@dataclass(frozen=True, eq=False)
class _Route:
    """Who sends what where, for one layer of one call."""

    # Of what this rank sends, by receiving rank and there by token.
    token_R: Tensor
    choice_C: Tensor  # places in the flattened `[N, K]`
    sent_rows: list[int]
    sent_choices: list[int]
    # Of what it gets, by sending rank.
    row_C: Tensor  # ascending: the choices of a row follow one another
    expert_C: Tensor  # counted from this rank's first
    choices_of_row_R: Tensor
    received_rows: list[int]
    received_choices: list[int]
    # Of what comes back, in the order it was sent.
    by_token_R: Tensor
    rows_of_token_N: Tensor

    @property
    def num_received_choices(self) -> int:
        return sum(self.received_choices)


@torch.no_grad()
def _plan(choice_NK: Tensor, num_local_experts: int, exchange: Exchange) -> _Route:
    num_tokens, num_choices = choice_NK.shape
    owner_NK = choice_NK // num_local_experts
    goes_DN = torch.zeros(exchange.degree, num_tokens, dtype=torch.bool, device=choice_NK.device)
    goes_DN.scatter_(0, owner_NK.T, True)
    token_R = goes_DN.nonzero()[:, 1]
    row_DN = goes_DN.cumsum(1) - 1  # place of a token among the rows for one rank
    choice_C = owner_NK.reshape(-1).argsort(stable=True)
    owner_C = owner_NK.reshape(-1)[choice_C]
    expert_C = choice_NK.reshape(-1)[choice_C] % num_local_experts
    details_C2 = torch.stack([expert_C, row_DN[owner_C, choice_C // num_choices]], 1).int()

    counts_D2 = torch.stack([goes_DN.sum(1), torch.bincount(owner_C, minlength=exchange.degree)], 1)
    received_D2 = torch.stack(exchange.all_to_all(counts_D2.unbind(), [(2,)] * exchange.degree, kind=KIND))
    sent_rows, sent_choices, received_rows, received_choices = torch.cat([counts_D2, received_D2], 1).T.tolist()
    details = exchange.all_to_all(details_C2.split(sent_choices), [(n, 2) for n in received_choices], kind=KIND)
    begins = [0, *accumulate(received_rows)]
    row_C = torch.cat([part[:, 1].long() + begin for part, begin in zip(details, begins, strict=False)])
    return _Route(
        token_R=token_R,
        choice_C=choice_C,
        sent_rows=sent_rows,
        sent_choices=sent_choices,
        row_C=row_C,
        expert_C=torch.cat(details)[:, 0].long(),
        choices_of_row_R=torch.bincount(row_C, minlength=sum(received_rows)),
        received_rows=received_rows,
        received_choices=received_choices,
        by_token_R=token_R.argsort(stable=True),
        rows_of_token_N=goes_DN.sum(0),
    )


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RE: Tensor, weight_C: Tensor, _: Tensor, route: _Route, exchange: Exchange
    ) -> tuple[Tensor, Tensor]:
        ctx.setting = route, exchange
        rows = _send(rows_RE, route.sent_rows, route.received_rows, exchange)
        return rows, _send(weight_C, route.sent_choices, route.received_choices, exchange)

    @staticmethod
    def backward(ctx: Any, d_rows_RE: Tensor, d_weight_C: Tensor) -> tuple[Tensor | None, ...]:
        route, exchange = ctx.setting
        d_rows = _send(d_rows_RE, route.received_rows, route.sent_rows, exchange)
        return d_rows, _send(d_weight_C, route.received_choices, route.sent_choices, exchange), None, None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RE: Tensor, route: _Route, exchange: Exchange) -> Tensor:
        ctx.setting = route, exchange
        return _send(rows_RE, route.received_rows, route.sent_rows, exchange)

    @staticmethod
    def backward(ctx: Any, d_rows_RE: Tensor) -> tuple[Tensor, None, None]:
        route, exchange = ctx.setting
        return _send(d_rows_RE, route.sent_rows, route.received_rows, exchange), None, None


def _send(rows: Tensor, sizes: list[int], received_sizes: list[int], exchange: Exchange) -> Tensor:
    shapes = [(size, *rows.shape[1:]) for size in received_sizes]
    return torch.cat(exchange.all_to_all(rows.split(sizes), shapes, kind=KIND))


def _sum_runs(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive rows, float32 at least; without atomics, whose order would change from run to run."""
    wide = rows.to(wide_dtype(rows.dtype))
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True)
