"""Group advantages: TRL's numbers, exact zeros for equal rewards."""

import pytest
import torch

from longstraw.errors import InputError
from longstraw.grpo.advantages import group_advantages
from longstraw.grpo.losses import GRPO
from longstraw.records import Prompt, Response, ResponseGroup

MODES = [("group", "group"), (True, "group"), ("batch", "batch"), ("none", "none"), (False, "none")]


def group(**values):
    (numbers,) = values.values() or ([0.0, 0.0],)
    return ResponseGroup(Prompt([1]), [Response([2]) for _ in numbers], **values)


@pytest.mark.parametrize(("spelling", "mode"), MODES)
@pytest.mark.parametrize("num_generations", [2, 3, 8])
@pytest.mark.parametrize("scale", [1.0, 1e-5, 300.0])
def test_advantages_equal_trl(trl_oracle, make_batch, spelling, mode, num_generations, scale):
    batch = make_batch(num_generations=num_generations, seed=num_generations)
    batch.rewards_B *= scale
    # TRL's config turns the bool spellings into words before its trainer sees them, as GRPO does.
    expected_B = trl_oracle.inputs(batch, {"scale_rewards": mode})["advantages"]
    groups = [group(rewards=rewards) for rewards in batch.rewards_B.split(num_generations)]
    advantages_B = torch.cat(GRPO(scale_rewards=spelling).group_advantages(groups))
    assert advantages_B.dtype == torch.float64
    torch.testing.assert_close(advantages_B, expected_B, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1 / 3, 1e9 + 0.1])
@pytest.mark.parametrize("num_generations", [1, 2, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(mode, reward, num_generations):
    groups = [group(rewards=[reward] * num_generations), group(rewards=[0.0, 1.0])]
    equal, unequal = group_advantages(groups, mode)
    assert equal.tolist() == [0.0] * num_generations
    assert unequal.abs().min() > 0


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
def test_rounding_of_a_sum_of_rewards_is_no_preference(mode):
    (advantages,) = group_advantages([group(rewards=[0.1 + 0.2, 0.3])], mode)
    assert advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
def test_a_small_difference_of_rewards_is_kept(mode):
    (advantages,) = group_advantages([group(rewards=[1.0, 1.0 + 1e-9])], mode)
    assert advantages[1] > 0 > advantages[0]


@pytest.mark.parametrize("mode", ["group", "batch", "none"])
def test_ready_advantages_are_used_as_given_and_leave_the_others_alone(mode):
    ready, earned = group(advantages=[5.0, 5.0]), group(rewards=[0.0, 0.25, 1.0])
    first, second = group_advantages([ready, earned], mode)
    assert first.tolist() == [5.0, 5.0]
    assert torch.equal(second, group_advantages([earned], mode)[0])


def test_a_lone_reward_of_the_batch_is_not_divided_by_an_undefined_deviation():
    (advantages,) = group_advantages([group(rewards=[0.4])], "batch")
    assert advantages.tolist() == [0.0]


def test_a_missing_reward_is_refused_before_it_reaches_the_advantages():
    with pytest.raises(InputError, match=r"rewards\[1\] is None"):
        group(rewards=[1.0, None])


def test_a_group_without_rewards_and_advantages_is_refused_by_its_place():
    with pytest.raises(InputError, match=r"groups\[1\] has neither rewards nor advantages"):
        group_advantages([group(rewards=[0.0, 1.0]), ResponseGroup(Prompt([1]), [Response([2])])])


def test_an_unknown_mode_is_refused():
    with pytest.raises(InputError, match='"group", "batch" or "none"'):
        group_advantages([group(rewards=[0.0, 1.0])], "std")
