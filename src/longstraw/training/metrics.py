"""The numbers of one optimizer step, under TRL's names, and the line that is printed for it.

Shape suffixes: G responses of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.records import ForwardBackwardReport, LossMetrics, StepReport
from longstraw.report.formats import bytes_text
from longstraw.training.progress import StageCosts
from longstraw.training.rewards import ScoredGroup

Metrics = dict[str, float | int | bool]

# Name in metrics.jsonl of each mean over trained tokens.
LOSS_METRIC_NAMES: Mapping[str, Callable[[LossMetrics], float]] = {
    "entropy": lambda metrics: metrics.entropy,
    "kl": lambda metrics: metrics.kl,
    "clip_ratio/low_mean": lambda metrics: metrics.clip_ratio_low,
    "clip_ratio/high_mean": lambda metrics: metrics.clip_ratio_high,
    "clip_ratio/region_mean": lambda metrics: metrics.clip_ratio_region,
    "sampling/sampling_logp_difference/mean": lambda metrics: metrics.sampling_logprob_difference_mean,
    "sampling/importance_sampling_ratio/mean": lambda metrics: metrics.importance_ratio_mean,
}


@dataclass(frozen=True)
class Rollout:
    """What is told of the responses to one row: plain values, which travel between ranks."""

    row_index: int
    num_prompt_tokens: int
    prompt_tail: str
    texts: Sequence[str]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    scored: ScoredGroup

    @property
    def num_tokens(self) -> int:
        """The prompt once, and every response."""
        return self.num_prompt_tokens + sum(self.lengths)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did and cost."""

    rollouts: Sequence[Rollout]
    reports: Sequence[ForwardBackwardReport]
    step_report: StepReport
    learning_rate: float
    seconds: float
    costs: StageCosts

    @property
    def loss(self) -> float:
        denominator = sum(report.denominator for report in self.reports)
        return sum(report.loss_sum for report in self.reports) / denominator if denominator else 0.0

    @property
    def bytes_sent(self) -> dict[str, int]:
        """By kind, in `forward_backward`, by the first rank of each context axis."""
        kinds = dict.fromkeys(kind for report in self.reports for kind in report.bytes_sent)
        return {kind: sum(report.bytes_sent.get(kind, 0) for report in self.reports) for kind in kinds}

    @property
    def num_skipped_groups(self) -> int:
        return sum(report.num_skipped_groups for report in self.reports)


def step_metrics(outcome: StepOutcome, *, step: int, num_tokens: int) -> Metrics:
    """One line of metrics.jsonl. `num_tokens` is the count over the whole run."""
    lengths = [length for rollout in outcome.rollouts for length in rollout.lengths]
    truncated = [is_truncated for rollout in outcome.rollouts for is_truncated in rollout.truncated]
    metrics: Metrics = {
        "step": step,
        "loss": outcome.loss,
        **reward_metrics([rollout.scored for rollout in outcome.rollouts]),
        "learning_rate": outcome.learning_rate,
        "grad_norm": outcome.step_report.grad_norm,
        **_loss_metrics(outcome.reports),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "num_tokens": num_tokens,
        "step_time": outcome.seconds,
        "skipped_groups": outcome.num_skipped_groups,
        "stepped": outcome.step_report.stepped,
    }
    metrics |= {f"time/{stage}_seconds": seconds for stage, seconds in outcome.costs.seconds.items()}
    metrics |= {f"memory/{stage}_peak_bytes": peak for stage, peak in outcome.costs.stage_peak_bytes.items()}
    metrics |= {f"traffic/{kind}_bytes": count for kind, count in outcome.bytes_sent.items()}
    if outcome.costs.peak_bytes is not None:
        metrics["memory/peak_bytes"] = outcome.costs.peak_bytes
    return metrics


def reward_metrics(groups: Sequence[ScoredGroup]) -> Metrics:
    """Means and standard deviations over all responses; what a function did not apply to is left out of its own."""
    totals = [total for group in groups for total in group.totals]
    metrics: Metrics = {
        "reward": _mean(totals),
        "reward_std": _std(totals),
        "frac_reward_zero_std": _mean([float(max(group.totals) == min(group.totals)) for group in groups]),
    }
    for name in groups[0].by_function:
        values = [value for group in groups for value in group.by_function[name] if value is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    for name in dict.fromkeys(name for group in groups for name in group.metrics):
        metrics[name] = _mean([value for group in groups for value in group.metrics.get(name, [])])
    return metrics


def completion_records(rollout: Rollout, advantages_G: Tensor, *, step: int) -> list[dict[str, object]]:
    """The group's lines of completions.jsonl."""
    scored = rollout.scored
    return [
        {
            "step": step,
            "row": rollout.row_index,
            "prompt_tail": rollout.prompt_tail,
            "completion": text,
            "reward": scored.totals[index],
            "rewards": {name: values[index] for name, values in scored.by_function.items()},
            "advantage": advantages_G[index].item(),
            "num_tokens": rollout.lengths[index],
            "truncated": rollout.truncated[index],
            **{name: values[index] for name, values in scored.extra_columns.items()},
        }
        for index, text in enumerate(rollout.texts)
    ]


def step_line(metrics: Metrics, *, max_steps: int, tokens_of_step: int) -> str:
    """The one line a step prints."""
    memory = metrics.get("memory/peak_bytes")
    parts = [
        f"step {metrics['step']}/{max_steps}",
        f"reward {metrics['reward']:.3f} ± {metrics['reward_std']:.3f}",
        f"loss {metrics['loss']:.3g}",
        f"grad {metrics['grad_norm']:.3g}" if metrics["stepped"] else "no update",
        f"length {metrics['completions/mean_length']:.1f}"
        f" ({metrics['completions/min_length']}-{metrics['completions/max_length']})",
        f"{tokens_of_step / max(float(metrics['step_time']), 1e-9):,.0f} tokens/s",
        f"{metrics['step_time']:.1f} s",
        *([] if memory is None else [f"peak {bytes_text(memory)}"]),
    ]
    return "  ".join(parts)


def _loss_metrics(reports: Sequence[ForwardBackwardReport]) -> Metrics:
    """Means over the tokens of all reports that replayed something, weighted by their tokens; extremes over all."""
    replayed = [report for report in reports if report.num_skipped_groups < report.num_groups]
    weights = [report.num_trained_tokens for report in replayed]
    means = [report.metrics for report in replayed] or [LossMetrics()]
    metrics: Metrics = {
        name: sum(weight * read(mean) for weight, mean in zip(weights or [1], means, strict=True)) / sum(weights or [1])
        for name, read in LOSS_METRIC_NAMES.items()
    }
    metrics["sampling/sampling_logp_difference/max"] = max(item.sampling_logprob_difference_max for item in means)
    metrics["sampling/importance_sampling_ratio/min"] = min(item.importance_ratio_min for item in means)
    metrics["sampling/importance_sampling_ratio/max"] = max(item.importance_ratio_max for item in means)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """With n - 1, as TRL reports it; 0 for a single value."""
    return torch.tensor(values, dtype=torch.float64).std().item() if len(values) > 1 else 0.0
