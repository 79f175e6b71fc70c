"""The harness itself: what fails on one rank fails the test, soon, and the next case runs again."""

import os
import signal
import time

import pytest
import torch

from parallel.harness import Ranks


@pytest.fixture
def own_ranks():
    started = Ranks(2)
    yield started
    started.stop()


def ranks_of(world):
    return world.rank, int(world.all_reduce_sum(torch.tensor([1]), kind="x"))


def fails_on_one_rank(world):
    if world.rank == 1:
        raise ValueError("what rank 1 says")
    world.all_reduce_sum(torch.ones(1), kind="x")


def hangs(world):
    time.sleep(60 * world.rank)


def dies(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (fails_on_one_rank, AssertionError, "(?s)rank 1 of 2 raised.*what rank 1 says"),
        (hangs, TimeoutError, r"hangs: ranks \[1\] of 2 did not finish in time"),
        (dies, ConnectionError, "rank 1 of 2 died"),
    ],
)
def test_a_fault_on_one_rank_fails_the_test_and_the_next_case_runs(own_ranks, case, error, message):
    assert own_ranks.run(ranks_of) == [(0, 2), (1, 2)]
    with pytest.raises(error, match=message):
        own_ranks.run(case, seconds=2)
    assert own_ranks.run(ranks_of) == [(0, 2), (1, 2)]
