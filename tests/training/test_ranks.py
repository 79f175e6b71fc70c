"""What ranks settle with one another around an update: shares, one caller for all, and errors that all are told."""

import pytest

from longstraw.errors import InputError, JointError
from longstraw.parallel.topology import Topology
from longstraw.training.ranks import Ranks


def shares(world, num_items):
    ranks = Ranks(Topology.create(data=world.degree))
    mine = ranks.share(list(range(num_items)))
    return mine, ranks.gather_shares([item * 10 for item in mine])


@pytest.mark.parametrize("num_items", [1, 2, 5])
def test_items_are_dealt_out_and_gathered_in_their_order(ranks, num_items):
    results = ranks(2).run(shares, num_items)
    assert [mine for mine, _ in results] == [list(range(num_items))[0::2], list(range(num_items))[1::2]]
    assert all(everything == [10 * item for item in range(num_items)] for _, everything in results)


def called_once(world):
    """On two context axes of two ranks."""
    ranks, calls = Ranks(Topology.create(context=2, data=2)), []
    value = ranks.once(lambda: calls.append(1) or {"rank": world.rank})
    return value, len(calls), ranks.is_first, ranks.gather(world.rank)


def test_the_first_rank_of_a_context_axis_computes_for_all_of_it(ranks):
    results = ranks(4).run(called_once)
    assert [value for value, *_ in results] == [{"rank": 0}] * 2 + [{"rank": 2}] * 2
    assert [calls for _, calls, *_ in results] == [1, 0, 1, 0]
    assert [is_first for *_, is_first, _ in results] == [True, False, False, False]
    assert all(everyone == [0, 1, 2, 3] for *_, everyone in results)


def fails_on_one(world, kind, failing):
    ranks = Ranks(Topology.create(context=world.degree))
    try:
        with ranks.together(ValueError):
            if world.rank in failing:
                raise kind("no such row")
    except JointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "failing", "told"),
    [
        (InputError, [1], "no such row"),
        (ValueError, [1], "rank 1: ValueError: no such row"),
        (InputError, [0, 1], "no"),
    ],
)
def test_what_one_rank_raises_is_raised_on_all(ranks, kind, failing, told):
    results = ranks(2).run(fails_on_one, kind, failing)
    assert results[0] == results[1]
    assert told in results[0]


def test_one_process_lets_errors_pass():
    ranks = Ranks()
    with pytest.raises(ValueError, match="mine"), ranks.together(Exception):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        ranks.once(lambda: (_ for _ in ()).throw(ValueError("mine")))
    assert ranks.can_save_after(ValueError())
    assert ranks.share([1, 2, 3]) == ranks.gather_shares([1, 2, 3]) == [1, 2, 3]
