"""The records that cross module borders: frozen, checked when made, free of behaviour.

Shape suffixes: P prompt tokens, T tokens of a span, R trained tokens of a trajectory, G trajectories of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw.errors import InputError

TokenIds = Tensor | Sequence[int]
Values = Tensor | Sequence[float]


def _token_ids(value: TokenIds, owner: str) -> Tensor:
    """A 1-D int64 tensor on the CPU, or an `InputError` that names the owner."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(f"{owner}: token_ids must be integers, got a {value.dtype} tensor.")
        ids = value.detach().to("cpu", torch.int64)
    else:
        numbers = list(value)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise InputError(f"{owner}: token_ids must be a list of int or a 1-D int64 tensor.")
        ids = torch.tensor(numbers, dtype=torch.int64)
    if ids.dim() != 1:
        raise InputError(f"{owner}: token_ids must have one dimension, got shape {tuple(ids.shape)}.")
    if ids.numel() == 0:
        raise InputError(f"{owner} is empty: at least one token is needed.")
    if int(ids.min()) < 0:
        raise InputError(f"{owner}: token_ids must not be negative, got {int(ids.min())}.")
    return ids


def _sampling_logprobs(value: Values | None, num_tokens: int, owner: str) -> Tensor | None:
    if value is None:
        return None
    logprobs = torch.as_tensor(value).detach().to("cpu", torch.float32)
    if logprobs.shape != (num_tokens,):
        raise InputError(f"{owner}: sampling_logprobs has shape {tuple(logprobs.shape)}, its tokens are {num_tokens}.")
    if not bool(torch.isfinite(logprobs).all()):
        raise InputError(f"{owner}: sampling_logprobs must be finite.")
    return logprobs


def _check_temperature(temperature: float, owner: str) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(f"{owner}: temperature must be a positive number, got {temperature}.")


@dataclass(frozen=True, eq=False)
class Prompt:
    """The shared long context, captured once.

    `token_ids`: 1-D int64 tensor or list of int, at least one token. Raises `InputError` otherwise.
    """

    token_ids: Tensor  # int64 [P], cpu

    def __init__(self, token_ids: TokenIds) -> None:
        object.__setattr__(self, "token_ids", _token_ids(token_ids, "prompt"))

    def __len__(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of one kind: an action (trained, in the loss) or an observation (not in the loss).

    `sampling_logprobs` are those of the policy that sampled the tokens, at `temperature`; the loss uses them as
    the old policy's. Without them the old policy is the current one (ratio 1). `temperature` divides the logits
    whenever the span is scored, so that scoring and sampling agree.
    """

    token_ids: Tensor  # int64 [T], cpu
    trained: bool
    sampling_logprobs: Tensor | None  # float32 [T], policy that sampled
    temperature: float

    def __init__(
        self,
        token_ids: TokenIds,
        trained: bool = True,
        *,
        sampling_logprobs: Values | None = None,
        temperature: float = 1.0,
    ) -> None:
        ids = _token_ids(token_ids, "span")
        _check_temperature(temperature, "span")
        if sampling_logprobs is not None and not trained:
            raise InputError("span: an observation (trained=False) has no sampling_logprobs.")
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "trained", bool(trained))
        object.__setattr__(self, "sampling_logprobs", _sampling_logprobs(sampling_logprobs, ids.numel(), "span"))
        object.__setattr__(self, "temperature", float(temperature))

    def __len__(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The spans after the prompt, in order. Trajectories of a group that begin alike share the work of it.

    `truncated`: the trajectory was cut off before its end (token limit), see `GRPO.mask_truncated_completions`.
    """

    spans: tuple[Span, ...]
    truncated: bool

    def __init__(self, spans: Sequence[Span], *, truncated: bool = False) -> None:
        if not spans:
            raise InputError("trajectory is empty: at least one span is needed.")
        if not all(isinstance(span, Span) for span in spans):
            raise InputError("trajectory: spans must be a list of longstraw.Span.")
        object.__setattr__(self, "spans", tuple(spans))
        object.__setattr__(self, "truncated", bool(truncated))


@dataclass(frozen=True, eq=False)
class Response:
    """A trajectory of one action span, as sampling returns it. Fields as in `Span` and `Trajectory`."""

    token_ids: Tensor  # int64 [R], cpu
    sampling_logprobs: Tensor | None  # float32 [R], policy that sampled
    temperature: float
    truncated: bool
    spans: tuple[Span, ...] = field(repr=False)

    def __init__(
        self,
        token_ids: TokenIds,
        sampling_logprobs: Values | None = None,
        *,
        temperature: float = 1.0,
        truncated: bool = False,
    ) -> None:
        ids = _token_ids(token_ids, "response")
        logprobs = _sampling_logprobs(sampling_logprobs, ids.numel(), "response")
        _check_temperature(temperature, "response")
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "sampling_logprobs", logprobs)
        object.__setattr__(self, "temperature", float(temperature))
        object.__setattr__(self, "truncated", bool(truncated))
        span = Span(ids, True, sampling_logprobs=logprobs, temperature=temperature)
        object.__setattr__(self, "spans", (span,))

    def __len__(self) -> int:
        return self.token_ids.numel()


def num_trained_tokens(trajectory: Trajectory | Response) -> int:
    """Tokens of the trajectory that are in the loss (R)."""
    return sum(len(span) for span in trajectory.spans if span.trained)


def _group_values(values: Values | None, num_responses: int, name: str) -> Tensor | None:
    """Float64 [G], or an `InputError` that names the first bad response."""
    if values is None:
        return None
    numbers = list(values.tolist() if isinstance(values, Tensor) else values)
    if len(numbers) != num_responses:
        raise InputError(f"response group: {len(numbers)} {name} for {num_responses} responses; give one for each.")
    for index, number in enumerate(numbers):
        if number is None:
            raise InputError(f"response group: {name}[{index}] is None; every response needs a number.")
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"response group: {name}[{index}] is {number!r}; it must be a finite number.")
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class ResponseGroup:
    """One prompt, its G trajectories, and what they earned: `rewards` or ready `advantages`, one number each.

    Both may be left out when the objective needs neither (a user function of logprobs).
    Raises `InputError` on a wrong count, a missing or a non-finite number.
    """

    prompt: Prompt
    responses: tuple[Trajectory | Response, ...]
    rewards: Tensor | None  # float64 [G]
    advantages: Tensor | None  # float64 [G]

    def __init__(
        self,
        prompt: Prompt,
        responses: Sequence[Trajectory | Response],
        *,
        rewards: Values | None = None,
        advantages: Values | None = None,
    ) -> None:
        if not isinstance(prompt, Prompt):
            raise InputError("response group: prompt must be a longstraw.Prompt.")
        if not responses:
            raise InputError("response group: it has no responses.")
        if not all(isinstance(response, Trajectory | Response) for response in responses):
            raise InputError("response group: responses must be longstraw.Response or longstraw.Trajectory.")
        if rewards is not None and advantages is not None:
            raise InputError("response group: give rewards or advantages, not both.")
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "responses", tuple(responses))
        object.__setattr__(self, "rewards", _group_values(rewards, len(responses), "rewards"))
        object.__setattr__(self, "advantages", _group_values(advantages, len(responses), "advantages"))


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn. Nothing else leaks in: the checkpoint's own generation config is not read.

    Order of the filters: temperature, top_k, top_p, min_p, each on what the one before left.
    """

    max_new_tokens: int = 512
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float | None = None  # keeps tokens at least this times as likely as the likeliest
    stop_ids: tuple[int, ...] = ()  # a response ends with the first of these; it is part of the response
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", tuple(int(stop) for stop in self.stop_ids))
        if self.max_new_tokens < 1:
            raise InputError(f"sampling: max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"sampling: temperature must be 0 (greedy) or positive, got {self.temperature}.")
        if self.top_k < 0:
            raise InputError(f"sampling: top_k must be 0 (all tokens) or positive, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"sampling: top_p must be in (0, 1], got {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"sampling: min_p must be in [0, 1], got {self.min_p}.")


@dataclass(frozen=True)
class LossMetrics:
    """Means over the trained tokens (`entropy`, `kl`, clip ratios, importance ratio) of one `forward_backward`."""

    entropy: float = 0.0
    kl: float = 0.0
    clip_ratio_low: float = 0.0
    clip_ratio_high: float = 0.0
    clip_ratio_region: float = 0.0
    importance_ratio_mean: float = 1.0
    importance_ratio_min: float = 1.0
    importance_ratio_max: float = 1.0
    sampling_logprob_difference_mean: float = 0.0
    sampling_logprob_difference_max: float = 0.0


@dataclass(frozen=True)
class ForwardBackwardReport:
    """What one `Engine.forward_backward` did. Gradients are sums; `loss` is `loss_sum / denominator`."""

    loss_sum: float
    denominator: float
    num_groups: int
    num_skipped_groups: int  # no gradient: equal rewards, or every response truncated and masked
    num_trajectories: int
    num_prompt_tokens: int
    num_trained_tokens: int
    metrics: LossMetrics
    stage_seconds: Mapping[str, float]  # capture, reference, score, replay, prompt_replay
    skipped_reasons: tuple[str, ...] = ()
    bytes_sent: Mapping[str, int] = field(default_factory=dict)  # by this rank to others, by kind

    @property
    def loss(self) -> float:
        return self.loss_sum / self.denominator if self.denominator else 0.0


@dataclass(frozen=True)
class StepReport:
    """What one transaction (`Engine.optimizer_step`) did."""

    stepped: bool  # False: nothing to learn from (all groups skipped), parameters and version unchanged
    denominator: float
    grad_norm: float  # global L2 norm after the division, before clipping
    policy_version: int
    reason: str = ""  # why it did not step
