"""The demo around the training: its configuration is valid, it passes on its paths, and it prints both scores."""

import json

import pytest

import demo
from longstraw.config_file import load_config


@pytest.fixture
def command(monkeypatch):
    """Records the arguments of `longstraw train` and ends as a command line does."""
    calls = []

    def longstraw(arguments):
        calls.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(demo, "longstraw", longstraw)
    return calls


def run_config(command, tmp_path, options):
    demo.train(options, model=tmp_path / "model", rows=tmp_path / "rows", run=tmp_path / "run")
    (arguments,) = command
    assert arguments[:2] == ["train", str(demo.CONFIG)]
    assert arguments[2::2] == ["--set"] * len(arguments[3::2])
    return load_config(demo.CONFIG, arguments[3::2])


def test_paths_of_this_machine_fill_in_the_configuration(command, tmp_path):
    config = run_config(command, tmp_path, demo.Options(None, tmp_path, None))
    assert config.model.name == str(tmp_path / "model")
    assert config.data.rows == str(tmp_path / "rows" / "train.jsonl")
    assert config.evaluation.rows == str(tmp_path / "rows" / "held_out.jsonl")
    assert config.run.output_dir == str(tmp_path / "run")
    assert config.rewards[0].function == f"{demo.HERE / 'retrieval_reward.py'}:bare_code"


def test_demo_trains_as_promised(command, tmp_path):
    config = run_config(command, tmp_path, demo.Options(None, tmp_path, None))
    assert config.engine.prompt_gradient == "exact"
    assert config.sampling.num_generations == 8
    assert config.sampling.temperature == 1.0
    assert config.evaluation.before
    assert config.evaluation.after
    assert [metric.function for metric in config.evaluation.metrics] == list(demo.GOALS)
    assert config.run.max_steps * config.run.prompts_per_step <= demo.NUM_TRAIN_ROWS


def test_quick_look_takes_fewer_steps_and_held_out_rows(command, tmp_path):
    config = run_config(command, tmp_path, demo.Options(3, tmp_path, 7))
    assert (config.run.max_steps, config.run.seed, config.evaluation.max_rows) == (3, 7, demo.NUM_QUICK_ROWS)


def test_failed_training_ends_the_demo(monkeypatch, tmp_path):
    def fail(arguments):
        raise SystemExit(2)

    monkeypatch.setattr(demo, "longstraw", fail)
    with pytest.raises(SystemExit):
        demo.train(demo.Options(None, tmp_path, None), model=tmp_path, rows=tmp_path, run=tmp_path)


def test_summary_shows_the_first_and_the_last_score(tmp_path):
    scores = [(0.15, 0.0), (0.5, 0.1), (0.97, 0.93)]
    records = [{"num_responses": 192, "contains_answer": contains, "exact_match": exact} for contains, exact in scores]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = demo.summary(tmp_path)
    assert "0.15 -> 0.97" in text
    assert "0.00 -> 0.93" in text
    assert "192 answers" in text
