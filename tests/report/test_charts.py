import json

import pytest

from longstraw.report.charts import learning_figures, response_figures, stage_uses, time_figure, update_figures
from longstraw.report.run_folder import read_run_folder


def run_of(folder, **metrics):
    row = {"step": 1} | {key.replace("__", "/"): value for key, value in metrics.items()}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return read_run_folder(folder)


def test_run_without_metrics_has_no_figures(tmp_path):
    run = run_of(tmp_path)
    assert learning_figures(run) + update_figures(run) + response_figures(run) == []
    assert time_figure(run) is None


def test_time_that_no_stage_accounts_for_is_shown_as_other(tmp_path):
    run = run_of(tmp_path, time__replay_seconds=3.0, time__capture_seconds=1.0, step_time=6.0)
    assert [label for label, _ in time_figure(run).legend] == ["capture", "replay", "other"]
    run = run_of(tmp_path, time__replay_seconds=3.0, step_time=3.001)
    assert [label for label, _ in time_figure(run).legend] == ["replay"]


def test_stages_keep_their_colour_whichever_are_there(tmp_path):
    few = stage_uses(run_of(tmp_path, time__replay_seconds=3.0))
    many = stage_uses(
        run_of(tmp_path, time__replay_seconds=3.0, time__capture_seconds=1.0, memory__reward_peak_bytes=7)
    )
    assert [use.stage for use in many] == ["capture", "replay", "reward"]
    assert few[0].colour == many[1].colour


def test_stage_takes_the_sum_of_seconds_and_the_most_bytes(make_run):
    run = read_run_folder(make_run(5))
    replay = next(use for use in stage_uses(run) if use.stage == "prompt_replay")
    assert replay.label == "prompt replay"
    assert replay.total_seconds == pytest.approx(sum(run.metrics.column("time/prompt_replay_seconds")))
    assert replay.peak_bytes == max(run.metrics.column("memory/prompt_replay_peak_bytes"))


def test_one_reward_function_needs_no_figure_of_its_own(tmp_path):
    run = run_of(tmp_path, reward=0.5, rewards__only__mean=0.5)
    assert [figure.title for figure in learning_figures(run)] == ["Reward"]


def test_features_that_were_never_at_work_have_no_figure(tmp_path):
    off = update_figures(run_of(tmp_path, kl=0.0, clip_ratio__region_mean=0.0, grad_norm=0.0))
    assert [figure.title for figure in off] == ["Gradient norm"]
    on = update_figures(run_of(tmp_path, kl=0.1, clip_ratio__region_mean=0.0))
    assert [figure.title for figure in on] == ["KL to the reference policy"]
