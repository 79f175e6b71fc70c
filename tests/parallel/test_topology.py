"""Axes over processes: who is where, which groups exist, and misfits that all ranks refuse with one message."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from longstraw.errors import InputError, LongStrawError, UnsupportedError
from longstraw.parallel.topology import Axis, Topology, check_degrees


def places(world, context, data, expert):
    topology = Topology.create(context=context, data=data, expert=expert)
    names = ("data", "context", "expert", "expert_copies", "world")
    axes = (topology.data, topology.context, topology.expert, topology.expert_copies, topology.world)
    assert expert != context or topology.expert.group is topology.context.group, "one group serves both axes"
    return {
        name: (axis.rank, dist.get_process_group_ranks(axis.group) if axis.group is not None else None)
        for name, axis in zip(names, axes, strict=True)
    }


def test_consecutive_ranks_share_a_context_and_experts_may_use_the_same_ranks(ranks):
    got = ranks(4).run(places, 2, 2, 2)
    assert [each["context"] for each in got] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [each["data"] for each in got] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    assert [each["expert"] for each in got] == [each["context"] for each in got]
    assert [each["expert_copies"] for each in got] == [each["data"] for each in got]
    assert [each["world"] for each in got] == [(rank, [0, 1, 2, 3]) for rank in range(4)]


def test_experts_may_be_divided_over_fewer_ranks_than_the_context(ranks):
    half = ranks(4).run(places, 4, 1, 2)
    assert [each["expert"] for each in half] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]
    assert [each["expert_copies"] for each in half] == [(0, [0, 2]), (0, [1, 3]), (1, [0, 2]), (1, [1, 3])]
    none = ranks(4).run(places, 4, 1, 1)
    assert [each["expert"] for each in none] == [(0, None)] * 4
    assert [each["expert_copies"] for each in none] == [(rank, [0, 1, 2, 3]) for rank in range(4)]


def refusal(world, context, data, expert):
    try:
        Topology.create(context=context, data=data, expert=expert)
    except LongStrawError as error:
        return type(error).__name__, str(error)
    return None


def test_a_misfit_is_refused_on_all_ranks_with_one_message(ranks):
    for degrees, part in (
        ((2, 1, 1), "data=1 times context=2 needs 2 processes, but there are 3"),
        ((3, 1, 2), "expert=2 does not divide context=3"),
        ((3, 0, 1), "data must be at least 1, got 0"),
    ):
        got = ranks(3).run(refusal, *degrees)
        assert len(set(got)) == 1
        assert got[0][0] == "InputError"
        assert part in got[0][1]


def test_one_process_needs_no_process_group():
    for topology in (Topology.single(), Topology.create()):
        assert topology.world.degree == topology.context.degree == topology.expert_copies.degree == 1
        assert topology.context.group is None
    with pytest.raises(InputError, match="needs 2 processes, but there are 1"):
        Topology.create(context=2)


@pytest.mark.parametrize(("context", "data", "expert"), [(1, 1, 1), (8, 1, 8), (2, 4, 2), (4, 2, 2), (32, 1, 32)])
def test_degrees_that_fit_are_taken(context, data, expert):
    check_degrees(context * data, context=context, data=data, expert=expert)


def test_heads_that_do_not_divide_are_refused():
    topology = Topology(context=Axis(3))
    topology.check_heads(6, 12)
    for key_heads, value_heads in ((16, 48), (6, 16)):
        with pytest.raises(UnsupportedError, match=f"context=3 does not divide .* {key_heads} key heads"):
            topology.check_heads(key_heads, value_heads)


def timeouts(world):
    """Of every group made, in seconds: what a rank of it waits for another."""
    topology = Topology.create(context=2, data=2, expert=2, timeout=timedelta(seconds=17))
    axes = (topology.data, topology.context, topology.expert, topology.expert_copies)
    return [axis.group._get_backend(axis.device).options._timeout.total_seconds() for axis in axes]


def test_the_axes_wait_as_long_as_they_are_told(ranks):
    assert ranks(4).run(timeouts) == [[17.0] * 4] * 4
