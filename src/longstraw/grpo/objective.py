"""What the engine asks of an objective, and the record it hands over.

Apart from the losses so that execution depends on this small contract only. An objective never sees a graph of the
model: it is evaluated on detached token logprobs that require grad, and autograd over that small vector gives the
cotangents that replay pulls through the model.

Shape suffixes: R trained tokens of one trajectory, G trajectories of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import InputError
from longstraw.records import LossMetrics, ResponseGroup


@dataclass(frozen=True, eq=False)
class TrajectoryLogprobs:
    """The trained tokens of one trajectory as the objective sees them, all float32 on one device."""

    logprobs_R: Tensor  # current policy; leaf that requires grad
    entropies_R: Tensor  # current policy; leaf that requires grad
    old_logprobs_R: Tensor  # policy that sampled, or logprobs_R detached where it was not recorded
    reference_logprobs_R: Tensor | None  # adapters off; present when the objective has beta > 0
    advantage: float
    truncated: bool


@dataclass(frozen=True, eq=False)
class LossSum:
    """Scalar contribution to the loss's numerator (a sum, not a mean) and detached per-token sums for metrics."""

    loss: Tensor
    metric_sums: LossMetricSums = field(default_factory=lambda: LossMetricSums())


@dataclass
class LossMetricSums:
    """Sums over trained tokens; `means()` divides once, like the loss."""

    num_tokens: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    clipped_region: float = 0.0
    importance_ratio: float = 0.0
    importance_ratio_min: float = float("inf")
    importance_ratio_max: float = float("-inf")
    sampling_logprob_difference: float = 0.0
    sampling_logprob_difference_max: float = 0.0

    def add(self, other: LossMetricSums) -> None:
        self.num_tokens += other.num_tokens
        self.entropy += other.entropy
        self.kl += other.kl
        self.clipped_low += other.clipped_low
        self.clipped_high += other.clipped_high
        self.clipped_region += other.clipped_region
        self.importance_ratio += other.importance_ratio
        self.importance_ratio_min = min(self.importance_ratio_min, other.importance_ratio_min)
        self.importance_ratio_max = max(self.importance_ratio_max, other.importance_ratio_max)
        self.sampling_logprob_difference += other.sampling_logprob_difference
        self.sampling_logprob_difference_max = max(
            self.sampling_logprob_difference_max, other.sampling_logprob_difference_max
        )

    def means(self) -> LossMetrics:
        if self.num_tokens == 0:
            return LossMetrics()
        count = self.num_tokens
        return LossMetrics(
            entropy=self.entropy / count,
            kl=self.kl / count,
            clip_ratio_low=self.clipped_low / count,
            clip_ratio_high=self.clipped_high / count,
            clip_ratio_region=self.clipped_region / count,
            importance_ratio_mean=self.importance_ratio / count,
            importance_ratio_min=self.importance_ratio_min,
            importance_ratio_max=self.importance_ratio_max,
            sampling_logprob_difference_mean=self.sampling_logprob_difference / count,
            sampling_logprob_difference_max=self.sampling_logprob_difference_max,
        )


class Objective(Protocol):
    """A loss over groups. `trajectory_loss` makes it separable: one forward serves score and replay."""

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_logprobs_R` must be given (beta > 0)."""
        ...

    def group_advantages(self, groups: Sequence[ResponseGroup]) -> list[Tensor]:
        """Float64 [G] for each group. Equal rewards give exact zeros."""
        ...

    def denominator(self, num_tokens: int, truncated: bool) -> float:
        """What one trajectory adds to the update's one denominator."""
        ...

    def is_masked(self, truncated: bool) -> bool:
        """Whether a trajectory is left out of the loss altogether."""
        ...

    def trajectory_loss(self, trajectory: TrajectoryLogprobs) -> LossSum:
        """Sum-form loss of one trajectory, differentiable in `logprobs_R` and `entropies_R`."""
        ...


@dataclass(frozen=True)
class GroupFunction:
    """A user's function of a group's token logprobs, not separable: the group is scored before it is replayed.

    The function gets a list of float32 [R], one per trajectory as `Engine.score` returns them, and the group
    if it takes a second argument. It returns the scalar loss, which is not divided by anything.
    """

    function: Callable[..., Tensor]
    takes_group: bool

    def loss(self, logprobs: list[Tensor], group: ResponseGroup) -> Tensor:
        value = self.function(logprobs, group) if self.takes_group else self.function(logprobs)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError("objective: the function must return one scalar tensor made from the logprobs.")
        if not bool(torch.isfinite(value)):
            raise InputError(f"objective: the function returned {value.item()}, the loss must be finite.")
        return value


def as_objective(objective: Objective | Callable[..., Tensor]) -> Objective | GroupFunction:
    """The objective itself, or a plain function wrapped as one."""
    if callable(objective):
        parameters = inspect.signature(objective).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return GroupFunction(objective, takes_group=len(positional) >= 2)
    return objective
