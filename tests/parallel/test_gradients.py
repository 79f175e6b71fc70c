"""Gradients summed over copies, one norm, and copies that must stay equal bit by bit."""

import pytest
import torch

from longstraw.errors import LongStrawError
from longstraw.parallel.exchange import Traffic
from longstraw.parallel.gradients import ParameterClass, check_same_parameters, digest, global_norm, sum_gradients
from longstraw.parallel.topology import Axis, Topology

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2), "never": (4,), "d": (1,)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "never": torch.float32, "d": torch.float32}


def parameters():
    return {name: torch.zeros(shape, dtype=DTYPES[name]) for name, shape in SHAPES.items()}


def gradient_of(rank, name):
    """Rank r has none for `d` unless it is the last of three; nobody has one for `never`."""
    if name == "never" or (name == "d" and rank != 2):
        return None
    generator = torch.Generator().manual_seed(100 * rank + ord(name[0]))
    values = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    return values.to(torch.promote_types(DTYPES[name], torch.float32))


def sums_are_those_of_one_process(world):
    traffic = Traffic()
    kind = ParameterClass(parameters(), world.axis)
    mine = {name: gradient_of(world.rank, name) for name in SHAPES}
    sums = sum_gradients(kind, mine, traffic)
    assert list(sums) == list(SHAPES)
    assert sums["never"] is None
    for name in ("a", "b", "c", "d"):
        parts = [gradient_of(rank, name) for rank in range(world.degree)]
        want = sum(part for part in parts if part is not None)
        assert sums[name].dtype == torch.promote_types(DTYPES[name], torch.float32)
        torch.testing.assert_close(sums[name], want, rtol=1e-6, atol=1e-6)
    # 23 numbers of 4 bytes and 4 of 8, each twice two thirds of them.
    assert traffic.report().bytes_by_kind["gradients"] == 30 * 4 + 5 * 8
    return {name: None if each is None else each.double().tolist() for name, each in sums.items()}


def test_gradients_are_summed_over_copies_and_equal_on_all(ranks):
    got = ranks(3).run(sums_are_those_of_one_process)
    assert got[0] == got[1] == got[2]


def norm_of_divided_parameters(world):
    """`a` is copied to all ranks, `experts` divided over pairs of them."""
    topology = Topology.create(context=4, expert=2)
    shared = ParameterClass({"a": torch.zeros(6)}, topology.world)
    experts = ParameterClass({"e": torch.zeros(3)}, topology.expert_copies, topology.expert)
    gradient = torch.full((3,), 2.0 + topology.expert.rank)
    return global_norm([(shared, {"a": torch.ones(6)}), (experts, {"e": gradient})], world)


def test_the_norm_counts_every_parameter_of_the_job_once(ranks):
    want = (6 + 3 * 4 + 3 * 9) ** 0.5
    assert ranks(4).run(norm_of_divided_parameters) == [pytest.approx(want, rel=1e-12)] * 4


def message_of(call):
    try:
        call()
    except LongStrawError as error:
        return str(error)
    return None


def not_finite_on_one_rank(world, value):
    experts = ParameterClass({"e": torch.zeros(3)}, Axis(), world.axis)
    gradient = torch.ones(3)
    if world.rank == 1:
        gradient[2] = value
    return message_of(lambda: global_norm([(experts, {"e": gradient})], world))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(ranks, value):
    want = "the gradient of e is not finite; the step was not taken."
    assert ranks(3).run(not_finite_on_one_rank, value) == [want] * 3


def compared(world, change):
    same = {"a": torch.arange(6.0), "b": torch.arange(4.0).bfloat16()}
    if world.rank == world.degree - 1:
        if change == "bit":
            same["b"].view(torch.int16)[3] ^= 1
        if change == "order":
            same["a"] = same["a"].flip(0)
    return message_of(lambda: check_same_parameters([ParameterClass(same, world.axis), ParameterClass({})], world))


@pytest.mark.parametrize(("change", "name"), [(None, None), ("bit", "b"), ("order", "a")])
def test_copies_that_differ_in_a_bit_or_an_order_stop_all_ranks(ranks, change, name):
    got = ranks(3).run(compared, change)
    assert len(set(got)) == 1
    if name is None:
        assert got[0] is None
    else:
        assert f"1 of 2 parameters differ between the copies 0 and 2 after the step, the first is {name};" in got[0]


def test_a_digest_does_not_depend_on_how_it_is_cut(monkeypatch):
    x = torch.randn(1000)
    whole = digest(x)
    monkeypatch.setattr("longstraw.parallel.gradients.DIGEST_BLOCK", 7)
    assert digest(x).equal(whole)


def test_one_process_keeps_its_gradients():
    kind = ParameterClass({"a": torch.zeros(3), "b": torch.zeros(2)})
    sums = sum_gradients(kind, {"a": torch.ones(3), "b": None}, Traffic())
    assert sums["a"].tolist() == [1, 1, 1]
    assert sums["b"] is None
