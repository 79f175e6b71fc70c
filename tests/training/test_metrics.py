from dataclasses import replace

import pytest
import torch

from longstraw.records import ForwardBackwardReport, LossMetrics, StepReport
from longstraw.training.metrics import Rollout, StepOutcome, completion_records, reward_metrics, step_line, step_metrics
from longstraw.training.progress import StageCosts
from longstraw.training.rewards import ScoredGroup


def report(loss_sum, denominator, num_tokens, *, num_skipped=0, **metrics):
    return ForwardBackwardReport(
        loss_sum,
        denominator,
        1,
        num_skipped,
        2,
        3,
        num_tokens,
        LossMetrics(**metrics),
        {},
        ("group 0: equal",) * num_skipped,
    )


def outcome(reports, *, stepped=True, costs=None):
    scored = ScoredGroup([1.0, 0.0], {"f": [1.0, None]})
    rollout = Rollout(0, 2, "a", ["x", "y"], [3, 1], [True, False], scored)
    return StepOutcome([rollout], reports, StepReport(stepped, 1.0, 0.5, 1), 1e-3, 2.0, costs or StageCosts())


def test_loss_is_one_sum_over_one_denominator():
    assert outcome([report(3.0, 1.0, 1), report(1.0, 7.0, 7)]).loss == 0.5


def test_loss_metrics_are_means_over_tokens_and_extremes_over_all():
    reports = [
        report(0, 1, 1, entropy=4.0, importance_ratio_min=0.5, importance_ratio_max=1.5),
        report(0, 1, 3, entropy=8.0, importance_ratio_min=0.7, importance_ratio_max=1.1),
        report(0, 1, 96, num_skipped=1),  # its metrics say nothing: it replayed nothing
    ]
    metrics = step_metrics(outcome(reports), step=5, num_tokens=60)
    assert metrics["entropy"] == 7.0
    assert metrics["sampling/importance_sampling_ratio/min"] == 0.5
    assert metrics["sampling/importance_sampling_ratio/max"] == 1.5
    assert metrics["skipped_groups"] == 1


def test_the_line_has_trls_names():
    costs = StageCosts({"capture": 0.5}, {"capture": 9}, 11)
    metrics = step_metrics(outcome([report(1, 2, 4)], costs=costs), step=5, num_tokens=60)
    assert metrics["step"] == 5
    assert (metrics["num_tokens"], metrics["step_time"], metrics["learning_rate"], metrics["grad_norm"]) == (
        60,
        2.0,
        1e-3,
        0.5,
    )
    assert [metrics[f"completions/{name}_length"] for name in ("mean", "min", "max")] == [2.0, 1, 3]
    assert metrics["completions/clipped_ratio"] == 0.5
    assert {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl"} <= set(metrics)
    assert {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"} <= set(metrics)
    assert (metrics["time/capture_seconds"], metrics["memory/capture_peak_bytes"], metrics["memory/peak_bytes"]) == (
        0.5,
        9,
        11,
    )
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_memory_is_absent_when_it_was_not_counted():
    metrics = step_metrics(outcome([report(1, 2, 4)]), step=1, num_tokens=6)
    assert not any(name.startswith("memory/") for name in metrics)
    assert "peak" not in step_line(metrics, max_steps=3, tokens_of_step=6)


def test_rewards_a_function_did_not_give_are_left_out_of_its_mean():
    groups = [
        ScoredGroup([1.0, 3.0], {"f": [1.0, None]}, metrics={"mine": [2.0]}),
        ScoredGroup([2.0, 2.0], {"f": [2.0, 3.0]}),
    ]
    metrics = reward_metrics(groups)
    assert metrics["reward"] == 2.0
    assert metrics["reward_std"] == pytest.approx((2 / 3) ** 0.5)
    assert metrics["rewards/f/mean"] == 2.0
    assert metrics["rewards/f/std"] == 1.0
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["mine"] == 2.0


def test_a_rollout_counts_its_prompt_once_and_every_response():
    assert outcome([]).rollouts[0].num_tokens == 2 + 3 + 1


def test_bytes_are_summed_by_kind_over_all_reports():
    counted = [{"rows": 5}, {}, {"rows": 2, "heads": 7}]
    reports = [replace(report(1, 2, 4), bytes_sent=each) for each in counted]
    metrics = step_metrics(outcome(reports), step=1, num_tokens=6)
    found = {name: value for name, value in metrics.items() if name.startswith("traffic/")}
    assert found == {"traffic/rows_bytes": 7, "traffic/heads_bytes": 7}


def test_each_response_has_a_record_of_its_own():
    scored = ScoredGroup([1.0, 0.0], {"f": [1.0, None]}, extra_columns={"judge": ["good", "bad"]})
    rollout = replace(outcome([]).rollouts[0], row_index=8, scored=scored)
    of_both = {"step": 4, "row": 8, "prompt_tail": "a"}
    assert completion_records(rollout, torch.tensor([0.5, -0.5]), step=4) == [
        {
            **of_both,
            "completion": "x",
            "reward": 1.0,
            "rewards": {"f": 1.0},
            "advantage": 0.5,
            "num_tokens": 3,
            "truncated": True,
            "judge": "good",
        },
        {
            **of_both,
            "completion": "y",
            "reward": 0.0,
            "rewards": {"f": None},
            "advantage": -0.5,
            "num_tokens": 1,
            "truncated": False,
            "judge": "bad",
        },
    ]


def test_costs_of_a_job_are_one_ranks_seconds_and_the_highest_peaks_of_all():
    mine = StageCosts({"capture": 1.0}, {"capture": 5}, 6)
    others = [StageCosts({"capture": 9.0}, {"capture": 3, "replay": 8}, 9), StageCosts({"capture": 2.0})]
    assert mine.with_peaks_of([others[1], mine, others[0]]) == StageCosts(
        {"capture": 1.0}, {"capture": 5, "replay": 8}, 9
    )
    assert StageCosts({"capture": 1.0}).with_peaks_of(others[1:]).peak_bytes is None


def test_a_step_prints_one_line():
    metrics = step_metrics(outcome([report(1, 2, 4)], costs=StageCosts(peak_bytes=3 * 2**20)), step=2, num_tokens=6)
    line = step_line(metrics, max_steps=10, tokens_of_step=6)
    assert line.startswith("step 2/10  reward 0.500 ± 0.707  loss 0.5  grad 0.5  length 2.0 (1-3)  3 tokens/s  2.0 s")
    assert line.endswith("peak 3 MiB")
    skipped = step_metrics(outcome([report(0, 0, 4, num_skipped=1)], stepped=False), step=2, num_tokens=6)
    assert "no update" in step_line(skipped, max_steps=10, tokens_of_step=6)
