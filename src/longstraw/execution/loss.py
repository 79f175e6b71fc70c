"""From a group's logprobs to the cotangent of every logprob: the only place where the objective is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw.errors import InputError
from longstraw.execution.score import Scores, path_scores
from longstraw.execution.tree import SpanNode
from longstraw.grpo.objective import GroupFunction, LossMetricSums, Objective, TrajectoryLogprobs
from longstraw.records import Response, ResponseGroup, Trajectory


@dataclass
class LossTotals:
    """Sums over what was replayed so far."""

    loss_sum: float = 0.0
    metric_sums: LossMetricSums = field(default_factory=LossMetricSums)


@dataclass(frozen=True, eq=False)
class ObjectiveLoss:
    """A separable objective on one group, evaluated trajectory by trajectory as their logprobs become known."""

    objective: Objective
    group: ResponseGroup
    advantages_G: Tensor
    references: list[Scores] | None  # present when the objective needs them
    totals: LossTotals

    def send(self, index: int, node: SpanNode) -> None:
        """Evaluate a trajectory's loss and add its cotangents along the path of its spans."""
        trajectory = self.group.responses[index]
        scores = path_scores(node)
        logprobs = scores.logprobs_R.detach().requires_grad_()
        entropies = scores.entropies_R.detach().requires_grad_()
        record = TrajectoryLogprobs(
            logprobs_R=logprobs,
            entropies_R=entropies,
            old_logprobs_R=old_logprobs(trajectory, scores.logprobs_R),
            reference_logprobs_R=None if self.references is None else self.references[index].logprobs_R,
            advantage=float(self.advantages_G[index]),
            truncated=trajectory.truncated,
        )
        with torch.enable_grad():
            loss = self.objective.trajectory_loss(record)
            if loss.loss.requires_grad:
                loss.loss.backward()
        self.totals.loss_sum += float(loss.loss.detach())
        self.totals.metric_sums.add(loss.metric_sums)
        add_cotangents(node, logprobs.grad, entropies.grad)


@dataclass(frozen=True, eq=False)
class GroupFunctionLoss:
    """A user's function of a whole group's logprobs, evaluated once on scores taken beforehand."""

    d_logprobs: list[Tensor | None]

    @classmethod
    def evaluate(
        cls, function: GroupFunction, group: ResponseGroup, scores: list[Scores], totals: LossTotals
    ) -> GroupFunctionLoss:
        logprobs = [score.logprobs_R.detach().requires_grad_() for score in scores]
        with torch.enable_grad():
            loss = function.loss(logprobs, group)
            if loss.requires_grad:
                loss.backward()
        totals.loss_sum += float(loss.detach())
        for score in scores:
            num_tokens = len(score.logprobs_R)
            totals.metric_sums.add(
                LossMetricSums(
                    num_tokens=num_tokens,
                    entropy=float(score.entropies_R.sum()),
                    importance_ratio=float(num_tokens),
                    importance_ratio_min=1.0,
                    importance_ratio_max=1.0,
                )
            )
        return cls([leaf.grad for leaf in logprobs])

    def send(self, index: int, node: SpanNode) -> None:
        add_cotangents(node, self.d_logprobs[index], None)


def old_logprobs(trajectory: Trajectory | Response, logprobs_R: Tensor) -> Tensor:
    """Logprobs of the policy that sampled; of the current one where a span did not record them."""
    parts, at = [], 0
    for span in trajectory.spans:
        if span.trained:
            current = logprobs_R[at : at + len(span)].detach()
            recorded = span.sampling_logprobs
            parts.append(current if recorded is None else recorded.to(current.device, current.dtype))
            at += len(span)
    return torch.cat(parts)


def add_cotangents(node: SpanNode, d_logprobs_R: Tensor | None, d_entropies_R: Tensor | None) -> None:
    """Add a trajectory's cotangents to the spans of its path. Raises `InputError` when they are not finite."""
    at = 0
    for part in node.trained_path():
        num_tokens = len(part.span)
        for total, addend in ((part.d_logprobs_T, d_logprobs_R), (part.d_entropies_T, d_entropies_R)):
            if total is None or addend is None:
                continue
            if not bool(torch.isfinite(addend).all()):
                raise InputError("objective: the gradient of the loss by the logprobs is not finite.")
            total += addend[at : at + num_tokens]
        at += num_tokens
