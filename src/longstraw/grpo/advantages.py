"""Advantages of a group's trajectories from their rewards, with TRL's options and numbers.

Apart from the losses because they are made from rewards alone, before any logprob is known.

Shape suffixes: G trajectories of one group, B trajectories of all groups given together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.errors import InputError
from longstraw.records import Prompt, Response, ResponseGroup

SCALE_REWARDS = ("group", "batch", "none")

STD_OFFSET = 1e-4  # TRL adds it to the standard deviation; it bounds the advantages of a nearly uniform group
EQUAL_SPREAD = 1e-12  # relative; below it a difference is the rounding of a weighted sum of rewards, not a preference


def group_advantages(groups: Sequence[ResponseGroup], scale_rewards: str = "group") -> list[Tensor]:
    """Float64 [G] for each group: reward minus the group's mean, over (standard deviation + 1e-4) where scaled.

    `scale_rewards`: "group" divides by the deviation within the group, "batch" by that of all rewards given in
    this call, "none" does not divide. Deviations are unbiased (divisor n - 1). A group whose rewards are all equal
    gets exact zeros, whatever the rounding of its mean. Ready `advantages` are returned as they are, and take
    no part in the batch's deviation. Raises `InputError` for a group with neither. Source: TRL 1.16, `GRPOTrainer`.
    """
    if scale_rewards not in SCALE_REWARDS:
        raise InputError(f'scale_rewards must be "group", "batch" or "none", got {scale_rewards!r}.')
    rewards = [group.rewards for group in groups if group.rewards is not None]
    batch_std = _unbiased_std(torch.cat(rewards)) if rewards and scale_rewards == "batch" else None
    return [_advantages(index, group, scale_rewards, batch_std) for index, group in enumerate(groups)]


def rewards_only(rewards: Sequence[float]) -> ResponseGroup:
    """A group for `group_advantages` alone: its prompt and responses mean nothing."""
    return ResponseGroup(Prompt([0]), [Response([0])] * len(rewards), rewards=rewards)


def _advantages(index: int, group: ResponseGroup, scale_rewards: str, batch_std: Tensor | None) -> Tensor:
    if group.advantages is not None:
        return group.advantages
    if group.rewards is None:
        raise InputError(f"groups[{index}] has neither rewards nor advantages; the GRPO loss needs one of them.")
    rewards_G = group.rewards
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if scale_rewards == "none":
        return centred_G
    std = _unbiased_std(rewards_G) if batch_std is None else batch_std
    return centred_G / (std + STD_OFFSET)


def _all_equal(rewards_G: Tensor) -> bool:
    spread = rewards_G.max() - rewards_G.min()
    return bool(spread <= EQUAL_SPREAD * rewards_G.abs().max())


def _unbiased_std(rewards_B: Tensor) -> Tensor:
    """Zero for a single reward, where the unbiased deviation is not defined."""
    return rewards_B.std() if rewards_B.numel() > 1 else rewards_B.new_zeros(())
