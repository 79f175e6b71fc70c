"""The GRPO family of losses, with TRL's names, defaults and numbers, in sum form.

One function per idea (ratio, surrogate, KL), then `GRPO`, which chooses among them. Every loss is a function of one
trajectory's token logprobs; the engine divides by the sum of `denominator` once per update.

Shape suffixes: R trained tokens of one trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

from longstraw.errors import InputError
from longstraw.grpo.advantages import SCALE_REWARDS, group_advantages
from longstraw.grpo.objective import LossMetricSums, LossSum, TrajectoryLogprobs
from longstraw.records import ResponseGroup

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
SEQUENCE_MEAN_LOSS_TYPES = ("grpo", "sapo")


def importance_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, level: str) -> Tensor:
    """Probability under the policy over that under the old one, [R], differentiable in `logprobs_R`.

    "sequence" is the geometric mean over the trajectory, repeated for each token. Source: GSPO, arXiv 2507.18071.
    """
    log_ratio_R = logprobs_R - old_logprobs_R
    if level == "sequence":
        log_ratio_R = log_ratio_R.mean().expand_as(log_ratio_R)
    return log_ratio_R.exp()


def clipped_surrogate(ratio_R: Tensor, advantage: float, bounds: tuple[float, float], delta: float | None) -> Tensor:
    """Pessimistic minimum of the plain and the clipped ratio times the advantage, [R].

    `delta` also bounds the plain ratio, and so the loss of a negative advantage. Sources: PPO, arXiv 1707.06347;
    two-sided clipping, arXiv 2505.07291.
    """
    plain_R = ratio_R if delta is None else ratio_R.clamp(max=delta)
    return torch.minimum(plain_R * advantage, ratio_R.clamp(*bounds) * advantage)


def cispo_surrogate(ratio_R: Tensor, logprobs_R: Tensor, advantage: float, max_ratio: float) -> Tensor:
    """REINFORCE weighted by the bounded ratio, which is a constant to autograd, [R]. Source: arXiv 2506.13585."""
    return ratio_R.clamp(max=max_ratio).detach() * advantage * logprobs_R


def sapo_surrogate(ratio_R: Tensor, advantage: float, temperature: float) -> Tensor:
    """A sigmoid gate in place of the clip, slope 1 at ratio 1, [R]. Source: SAPO, arXiv 2511.20347."""
    return torch.sigmoid(temperature * (ratio_R - 1)) * (4 / temperature) * advantage


def k3_divergence(logprobs_R: Tensor, reference_logprobs_R: Tensor) -> Tensor:
    """Non-negative estimate of KL(policy, reference) from tokens of the policy, [R]: exp(d) - d - 1."""
    difference_R = reference_logprobs_R - logprobs_R
    return torch.expm1(difference_R) - difference_R  # expm1: exp(d) - 1 would cancel where the policies are close


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group relative policy optimisation: the default objective. Names, defaults and numbers are TRL 1.16's.

    Reductions, over all trajectories of an update: grpo and sapo, mean over trajectories of the mean over tokens; bnpo,
    dapo and cispo, mean over tokens; dr_grpo, sum over tokens / (trajectories * max_completion_length). TRL's bnpo is a
    mean per micro-batch, ours per update. GSPO is `loss_type="grpo", importance_sampling_level="sequence"`.
    A setting that is out of range raises `InputError`.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # None: same as epsilon. For cispo the largest ratio itself, recommended 5.0
    delta: float | None = None  # upper bound of the unclipped ratio, > 1 + epsilon; not used by cispo and sapo
    beta: float = 0.0  # weight of the divergence from the reference policy; 0 needs no reference
    importance_sampling_level: str = "token"
    scale_rewards: str | bool = "group"  # "group" (or True), "batch", "none" (or False); becomes the word
    mask_truncated_completions: bool = False
    max_completion_length: int | None = None  # tokens; dr_grpo divides by it
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    use_bias_correction_kl: bool = True  # multiplies the divergence by the ratio, for an unbiased gradient of it

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        if self.loss_type == "gspo":
            raise InputError('GRPO: for GSPO set loss_type="grpo" and importance_sampling_level="sequence".')
        _check_choice("loss_type", self.loss_type, LOSS_TYPES)
        _check_choice("importance_sampling_level", self.importance_sampling_level, IMPORTANCE_SAMPLING_LEVELS)
        _check_choice("scale_rewards", self.scale_rewards, SCALE_REWARDS)
        _check_number("epsilon", self.epsilon)
        _check_number("beta", self.beta)
        if self.epsilon_high is not None:
            _check_number("epsilon_high", self.epsilon_high)
        if self.delta is not None:
            _check_number("delta", self.delta, positive=True)
        _check_number("sapo_temperature_pos", self.sapo_temperature_pos, positive=True)
        _check_number("sapo_temperature_neg", self.sapo_temperature_neg, positive=True)
        _check_bool("mask_truncated_completions", self.mask_truncated_completions)
        _check_bool("use_bias_correction_kl", self.use_bias_correction_kl)
        self._check_max_completion_length()

    def _check_max_completion_length(self) -> None:
        length = self.max_completion_length
        if length is None:
            if self.loss_type == "dr_grpo":
                raise InputError('GRPO: loss_type "dr_grpo" divides by max_completion_length; set it, in tokens.')
        elif isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise InputError(f"GRPO: max_completion_length must be a whole number of at least 1 token, got {length!r}.")

    @property
    def needs_reference(self) -> bool:
        """Whether the adapter-off policy must be scored too."""
        return self.beta > 0

    def group_advantages(self, groups: Sequence[ResponseGroup]) -> list[Tensor]:
        """Float64 [G] for each group; `scale_rewards="batch"` means the groups of this one call."""
        return group_advantages(groups, str(self.scale_rewards))

    def is_masked(self, truncated: bool) -> bool:
        """Truncated trajectories are left out when `mask_truncated_completions` is set."""
        return truncated and self.mask_truncated_completions

    def denominator(self, num_tokens: int, truncated: bool) -> float:
        """As in TRL, a masked trajectory still counts as a sequence, but its tokens do not count as tokens."""
        if self.loss_type in SEQUENCE_MEAN_LOSS_TYPES:
            return 1.0
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None, "checked when the settings were made"
            return float(self.max_completion_length)
        return 0.0 if self.is_masked(truncated) else float(num_tokens)

    def trajectory_loss(self, trajectory: TrajectoryLogprobs) -> LossSum:
        """Contribution to the numerator, differentiable in `logprobs_R`; entropies are only reported.

        A masked trajectory gives zero with zero cotangents and no metrics. Any float dtype.
        """
        logprobs_R = trajectory.logprobs_R
        if self.is_masked(trajectory.truncated):
            return LossSum((logprobs_R * 0.0).sum())
        ratio_R = importance_ratio(logprobs_R, trajectory.old_logprobs_R, self.importance_sampling_level)
        kl_R = self._divergence(trajectory, ratio_R)
        loss = (self.beta * kl_R - self._surrogate(trajectory, ratio_R)).sum()
        if self.loss_type in SEQUENCE_MEAN_LOSS_TYPES:
            loss = loss / max(logprobs_R.numel(), 1)
        return LossSum(loss, self._metric_sums(trajectory, ratio_R, kl_R))

    @property
    def _upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def _bounds(self) -> tuple[float, float]:
        return 1 - self.epsilon, 1 + self._upper_epsilon

    def _surrogate(self, trajectory: TrajectoryLogprobs, ratio_R: Tensor) -> Tensor:
        advantage = trajectory.advantage
        if self.loss_type == "cispo":
            return cispo_surrogate(ratio_R, trajectory.logprobs_R, advantage, self._upper_epsilon)
        if self.loss_type == "sapo":
            temperature = self.sapo_temperature_pos if advantage > 0 else self.sapo_temperature_neg
            return sapo_surrogate(ratio_R, advantage, temperature)
        return clipped_surrogate(ratio_R, advantage, self._bounds, self.delta)

    def _divergence(self, trajectory: TrajectoryLogprobs, ratio_R: Tensor) -> Tensor:
        """What `beta` weighs, [R]; zeros where no reference is needed."""
        if not self.needs_reference:
            return torch.zeros_like(ratio_R)
        if trajectory.reference_logprobs_R is None:
            raise InputError(f"GRPO: beta is {self.beta}, so reference_logprobs_R must be given.")
        kl_R = k3_divergence(trajectory.logprobs_R, trajectory.reference_logprobs_R)
        return kl_R * ratio_R if self.use_bias_correction_kl else kl_R

    def _clipped(self, ratio_R: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
        """Bool [R] twice: tokens that the lower, and the upper bound took out of the gradient."""
        never_R = torch.zeros_like(ratio_R, dtype=torch.bool)
        if self.loss_type == "sapo":
            return never_R, never_R
        if self.loss_type == "cispo":
            return never_R, ratio_R > self._upper_epsilon if advantage > 0 else never_R
        low, high = self._bounds
        bounded_R = ratio_R if self.delta is None else ratio_R.clamp(max=self.delta)
        return bounded_R < low if advantage < 0 else never_R, bounded_R > high if advantage > 0 else never_R

    @torch.no_grad()
    def _metric_sums(self, trajectory: TrajectoryLogprobs, ratio_R: Tensor, kl_R: Tensor) -> LossMetricSums:
        """Sums over tokens, at sequence level too: a clipped trajectory counts with its length."""
        num_tokens = ratio_R.numel()
        if num_tokens == 0:
            return LossMetricSums()
        difference_R = trajectory.logprobs_R - trajectory.old_logprobs_R
        token_ratio_R = difference_R.exp()  # of tokens at any level: it tells how far sampling and scoring differ
        low_R, high_R = self._clipped(ratio_R, trajectory.advantage)
        summed = (trajectory.entropies_R, kl_R, low_R, high_R, token_ratio_R, difference_R.abs())
        sums = [values_R.double().sum() for values_R in summed]
        extremes = [token_ratio_R.min(), token_ratio_R.max(), difference_R.abs().max()]
        # One transfer from the device for all of them.
        numbers = torch.stack([*sums, *(extreme.double() for extreme in extremes)]).tolist()
        entropy, kl, low, high, ratio, difference, ratio_min, ratio_max, difference_max = numbers
        return LossMetricSums(
            num_tokens=num_tokens,
            entropy=entropy,
            kl=kl,
            clipped_low=low,
            clipped_high=high,
            clipped_region=low + high,
            importance_ratio=ratio,
            importance_ratio_min=ratio_min,
            importance_ratio_max=ratio_max,
            sampling_logprob_difference=difference,
            sampling_logprob_difference_max=difference_max,
        )


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value in choices:
        return
    nearest = get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
    raise InputError(f'GRPO: {name} {value!r} is unknown; did you mean "{nearest}"? Known are {", ".join(choices)}.')


def _check_number(name: str, value: object, *, positive: bool = False) -> None:
    kind = "positive" if positive else "non-negative"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"GRPO: {name} must be a {kind} number, got {value!r}.")
    if value < 0 or (positive and value == 0):
        raise InputError(f"GRPO: {name} must be {kind}, got {value!r}.")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"GRPO: {name} must be true or false, got {value!r}.")
