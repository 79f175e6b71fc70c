"""Which metrics go into which figure, and what a reader should know about each.

A figure whose metrics are all absent, or whose feature was never at work, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longstraw.report.plots import REST_COLOUR, Line, line_chart, stacked_chart
from longstraw.report.run_folder import RunFolder, StepTable

STAGES = ("capture", "sample", "score", "reference", "replay", "prompt_replay")
NOTICEABLE_REST = 0.01  # share of the run's time that no stage accounts for


@dataclass(frozen=True)
class Figure:
    """One chart with its words. The legend is empty where the title says all."""

    title: str
    explanation: str
    svg: str
    legend: tuple[tuple[str, int], ...] = ()  # label, colour


@dataclass(frozen=True)
class StageUse:
    """What one stage took over the whole run; NaN where it was not recorded."""

    stage: str
    colour: int
    total_seconds: float
    peak_bytes: float

    @property
    def label(self) -> str:
        """The stage's name for a reader."""
        return self.stage.replace("_", " ")


@dataclass(frozen=True)
class _Curve:
    key: str
    label: str
    low: str = ""
    high: str = ""


def learning_figures(run: RunFolder) -> list[Figure]:
    """Reward, held-out scores, and the reward of each function."""
    names = run.metrics.keys_between("rewards/", "/mean")
    per_function = [_Curve(f"rewards/{name}/mean", name) for name in names]
    scores = [_Curve(key, key) for key in run.score_names]
    figures = [
        _reward_figure(run.metrics),
        _figure(
            run.evaluations,
            scores,
            "Held-out scores",
            "Responses to rows that are never trained on.",
            from_zero=True,
        ),
    ]
    if len(names) > 1:
        figures.append(
            _figure(run.metrics, per_function, "Reward by function", "Mean of each function before weighting.")
        )
    return [figure for figure in figures if figure]


def update_figures(run: RunFolder) -> list[Figure]:
    """Loss, gradient norm, entropy, KL, clipping, learning rate."""
    clipping = [
        _Curve("clip_ratio/region_mean", "all"),
        _Curve("clip_ratio/low_mean", "too unlikely"),
        _Curve("clip_ratio/high_mean", "too likely"),
    ]
    mismatch = [
        _Curve("sampling/sampling_logp_difference/max", "largest"),
        _Curve("sampling/sampling_logp_difference/mean", "mean"),
    ]
    mismatch_text = "Distance between a token's logprob when sampled and when trained on."
    table = run.metrics
    figures = [
        _figure(
            table, [_Curve("loss", "loss")], "Loss", "Hovers near zero while responses come from the policy itself."
        ),
        _figure(table, [_Curve("grad_norm", "norm")], "Gradient norm", "Before clipping.", from_zero=True),
        _figure(table, [_Curve("entropy", "entropy")], "Entropy", "Mean over trained tokens, in nats.", from_zero=True),
        _figure(
            table,
            [_Curve("kl", "KL")],
            "KL to the reference policy",
            "Mean over trained tokens.",
            from_zero=True,
            only_if_used=True,
        ),
        _figure(
            table,
            clipping,
            "Clipped tokens",
            "Share of tokens outside the trust region.",
            from_zero=True,
            only_if_used=True,
        ),
        _figure(table, mismatch, "Sampling mismatch", mismatch_text, from_zero=True, only_if_used=True),
        _figure(
            table, [_Curve("learning_rate", "rate")], "Learning rate", "After warm-up and schedule.", from_zero=True
        ),
    ]
    return [figure for figure in figures if figure]


def response_figures(run: RunFolder) -> list[Figure]:
    """Length of responses, and the shares of truncated responses and of groups that teach nothing."""
    length = [
        _Curve("completions/mean_length", "mean", low="completions/min_length", high="completions/max_length"),
    ]
    shares = [
        _Curve("completions/clipped_ratio", "responses cut off at the limit"),
        _Curve("frac_reward_zero_std", "groups with equal rewards"),
    ]
    length_text = "Tokens: mean, and the range from shortest to longest."
    figures = [
        _figure(run.metrics, length, "Response length", length_text, from_zero=True),
        _figure(run.metrics, shares, "Lost signal", "Share of what teaches little or nothing.", from_zero=True),
    ]
    return [figure for figure in figures if figure]


def time_figure(run: RunFolder) -> Figure | None:
    """Seconds of every step, stacked by stage; what no stage accounts for is `other`."""
    table = run.metrics
    parts = [
        Line(use.label, table.steps, table.column(f"time/{use.stage}_seconds"), use.colour)
        for use in stage_uses(run)
        if math.isfinite(use.total_seconds)
    ]
    rest = _rest_seconds(table, parts)
    total = sum(value for _, value in table.finite("step_time"))
    if sum(rest) > NOTICEABLE_REST * total:
        parts.append(Line("other", table.steps, rest, REST_COLOUR))
    if not parts:
        return None
    svg = stacked_chart(table.steps, parts, chart_id="time", description="Seconds of each step by stage")
    legend = tuple((part.label, part.colour) for part in parts)
    return Figure("Time of each step", "Seconds, stacked by stage.", svg, legend)


def stage_uses(run: RunFolder) -> list[StageUse]:
    """Time and memory by stage in the order of an update; stages of another name come last."""
    table = run.metrics
    named = table.keys_between("time/", "_seconds") + table.keys_between("memory/", "_peak_bytes")
    others = [stage for stage in dict.fromkeys(named) if stage not in STAGES]
    uses = []
    for index, stage in enumerate([*STAGES, *others]):
        seconds = [value for _, value in table.finite(f"time/{stage}_seconds")]
        sizes = [value for _, value in table.finite(f"memory/{stage}_peak_bytes")]
        if seconds or sizes:
            colour = index if index < REST_COLOUR else REST_COLOUR
            uses.append(StageUse(stage, colour, sum(seconds) if seconds else math.nan, max(sizes, default=math.nan)))
    return uses


def _reward_figure(table: StepTable) -> Figure | None:
    rewards, spreads = table.column("reward"), table.column("reward_std")
    if not table.finite("reward"):
        return None
    low = [reward - spread for reward, spread in zip(rewards, spreads, strict=True)]
    high = [reward + spread for reward, spread in zip(rewards, spreads, strict=True)]
    line = Line("reward", table.steps, rewards, 0, low, high)
    svg = line_chart([line], chart_id="reward", description="Mean reward by step")
    band = "; the band is one standard deviation" if table.finite("reward_std") else ""
    return Figure("Reward", f"Mean over the responses of a step{band}.", svg)


def _figure(
    table: StepTable,
    curves: Sequence[_Curve],
    title: str,
    explanation: str,
    *,
    from_zero: bool = False,
    only_if_used: bool = False,  # leave it out while every number is zero
) -> Figure | None:
    lines = [
        Line(
            curve.label,
            table.steps,
            table.column(curve.key),
            colour % REST_COLOUR,
            table.column(curve.low) if curve.low in table.columns else None,
            table.column(curve.high) if curve.high in table.columns else None,
        )
        for colour, curve in enumerate(curves)
        if table.finite(curve.key)
    ]
    used = any(value for line in lines for value in line.values if math.isfinite(value))
    if not lines or (only_if_used and not used):
        return None
    chart_id = "-".join(title.lower().split())
    svg = line_chart(lines, chart_id=chart_id, description=f"{title} by step", from_zero=from_zero)
    legend = tuple((line.label, line.colour) for line in lines) if len(curves) > 1 else ()
    return Figure(title, explanation, svg, legend)


def _rest_seconds(table: StepTable, parts: Sequence[Line]) -> list[float]:
    rest = []
    for index, total in enumerate(table.column("step_time")):
        known = sum(part.values[index] for part in parts if math.isfinite(part.values[index]))
        rest.append(max(total - known, 0.0) if math.isfinite(total) else 0.0)
    return rest
