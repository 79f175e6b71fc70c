"""Tokens to experts on other ranks and back: against one process that has all experts, values and every gradient."""

from functools import partial

import pytest
import torch

from longstraw.parallel.exchange import Exchange
from longstraw.parallel.expert import run_experts
from longstraw.parallel.topology import Axis

WIDTH = 5


def weights_of(num_experts):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_experts, WIDTH, WIDTH, generator=generator, dtype=torch.float64)


def expert_outputs(matrices, hidden, choice, weight):
    """What a stock experts module computes, one expert after the other."""
    out = torch.zeros_like(hidden)
    for expert in range(len(matrices)):
        for slot in range(choice.shape[1]):
            rows = (choice[:, slot] == expert).nonzero()[:, 0]
            out = out.index_add(0, rows, (hidden[rows] @ matrices[expert]).tanh() * weight[rows, slot, None])
    return out


def problem(rank, num_tokens, num_experts, num_choices, allowed):
    """A rank's tokens; choices among the allowed experts, different ones for a token where there are enough."""
    generator = torch.Generator().manual_seed(100 + rank)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.rand(num_tokens, num_choices, generator=generator, dtype=torch.float64)
    scores = torch.rand(num_tokens, len(allowed), generator=generator)
    choice = torch.tensor(allowed)[scores.topk(num_choices, 1).indices]
    return hidden, choice, weight, torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)


def divided(world, sizes, num_experts, num_choices, allowed):
    """Outputs and gradients of this rank: of its tokens, and of its experts from everyone's tokens."""
    hidden, choice, weight, d_out = problem(world.rank, sizes[world.rank], num_experts, num_choices, allowed)
    per_rank = num_experts // world.degree
    mine = weights_of(num_experts)[world.rank * per_rank : (world.rank + 1) * per_rank].clone().requires_grad_()
    hidden.requires_grad_()
    weight.requires_grad_()
    experts = partial(expert_outputs, mine)
    run = partial(run_experts, hidden, choice, weight, experts, num_local_experts=per_rank, exchange=world)
    out = run()
    out.backward(d_out)
    with torch.no_grad():
        again = run()
    assert torch.equal(again, out)
    return out.detach(), hidden.grad, weight.grad, mine.grad


CASES = {
    "all experts": (8, 3, list(range(8))),
    "experts of the first rank only": (12, 2, [0, 1]),
    "one expert": (12, 1, [11]),
    "two choices on one rank": (12, 2, [2, 3, 10]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("degree", "sizes"), [(1, (6,)), (2, (7, 1)), (3, (1, 1, 9)), (4, (5, 4, 4, 5))])
def test_divided_experts_give_outputs_and_gradients_of_one_process(ranks, degree, sizes, case):
    num_experts, num_choices, allowed = CASES[case]
    if num_experts % degree:
        num_experts = 12
    results = ranks(degree).run(divided, sizes, num_experts, num_choices, allowed)
    matrices = weights_of(num_experts).requires_grad_()
    for rank, (out, d_hidden, d_weight, _) in enumerate(results):
        hidden, choice, weight, d_out = problem(rank, sizes[rank], num_experts, num_choices, allowed)
        hidden.requires_grad_()
        weight.requires_grad_()
        want = expert_outputs(matrices, hidden, choice, weight)
        want.backward(d_out)
        for got, expected in ((out, want.detach()), (d_hidden, hidden.grad), (d_weight, weight.grad)):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    parts = matrices.grad.chunk(degree)
    for (*_, got), want in zip(results, parts, strict=True):
        # A rank whose experts got no token has no gradient; in one process it is zero.
        torch.testing.assert_close(torch.zeros_like(want) if got is None else got, want, rtol=1e-12, atol=1e-12)


def frozen_inputs(world):
    """Nothing but the experts of one rank gets a gradient: the other's backward must still join."""
    hidden, choice, weight, d_out = problem(world.rank, 4, 4, 1, [0, 1])
    mine = torch.ones(2, WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    out = run_experts(
        hidden,
        choice,
        weight,
        lambda rows, expert, w: expert_outputs(mine, rows, expert, w),
        num_local_experts=2,
        exchange=world,
    )
    out.backward(d_out)
    return mine.grad is not None


def test_idle_experts_join_in_backward(ranks):
    assert ranks(2).run(frozen_inputs) == [True, False]


def bytes_of_rows(world, num_choices, dtype):
    """Rows that travel to the other rank and back, forward and backward, and what goes with them."""
    before = world.traffic.report().bytes_by_kind.get("experts", 0)
    hidden = torch.zeros(6, WIDTH, dtype=dtype, requires_grad=True)
    choice = torch.arange(num_choices).expand(6, -1) + (2 if world.rank == 0 else 0)  # all on the other rank
    weight = torch.ones(6, num_choices, dtype=torch.float64)
    run_experts(hidden, choice, weight, lambda rows, *_: rows * 1, num_local_experts=2, exchange=world).sum().backward()
    return world.traffic.report().bytes_by_kind["experts"] - before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_row_travels_once_to_a_rank_that_has_several_of_its_experts(ranks, dtype):
    row, detail, counts = WIDTH * dtype.itemsize, 2 * 4 + 2 * 8, 2 * 8
    for num_choices in (1, 2):
        want = 6 * (4 * row + num_choices * detail) + counts
        assert ranks(2).run(bytes_of_rows, num_choices, dtype) == [want] * 2


def test_half_precision_is_summed_in_float32_and_rounded_once_on_a_rank():
    hidden = torch.randn(6, WIDTH, dtype=torch.bfloat16)
    choice = torch.rand(6, 8).argsort(1)
    weight = torch.rand(6, 8)

    def experts(rows, expert, w):
        return (rows.float() * (expert + 1) * w).bfloat16()

    out = run_experts(hidden, choice, weight, experts, num_local_experts=8, exchange=Exchange(Axis()))
    each = torch.stack([experts(hidden, choice[:, [k]], weight[:, [k]]) for k in range(8)])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, each.double().sum(0).bfloat16())
