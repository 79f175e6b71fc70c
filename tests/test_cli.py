import json
import sys

import pytest

from longstraw import cli
from longstraw.errors import InputError

TEXT = """
model: {name: some/model}
data: {rows: rows.jsonl}
rewards: [{function: exact_match}]
run: {output_dir: out, max_steps: 4}
"""


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run.yaml").write_text(TEXT)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """Stands in for training; keeps the configuration and options it was called with."""
    calls = []
    monkeypatch.setattr(cli, "_train", lambda config, launched, **options: calls.append((config, options)))
    monkeypatch.setattr(cli, "_write_report", lambda folder: folder / "report.html")
    return calls


def run(*arguments):
    """Exit status of the command line."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return caught.value.code


def test_version_is_printed(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("longstraw ")


def test_train_applies_overrides_and_names_the_report(in_folder, calls, capsys):
    assert run("train", "run.yaml", "--set", "run.max_steps=7", "--set", "optimizer.learning_rate=1e-3") == 0
    ((config, options),) = calls
    assert (config.run.max_steps, config.optimizer.learning_rate) == (7, 1e-3)
    assert options == {"is_resumed": False, "resume_from": None}
    assert capsys.readouterr().out == "report: out/report.html\n"


def test_resume_takes_the_latest_checkpoint_or_a_named_one(in_folder, calls):
    run("train", "run.yaml", "--resume")
    run("train", "run.yaml", "--resume-from", "out/checkpoints/step-000002")
    assert [options["is_resumed"] for _, options in calls] == [True, True]
    assert [str(options["resume_from"]) for _, options in calls] == ["None", "out/checkpoints/step-000002"]


def test_an_error_is_one_sentence_without_a_traceback(in_folder, calls, capsys):
    assert run("train", "run.yaml", "--set", "run.max_stepz=7") == 2
    streams = capsys.readouterr()
    assert streams.err == "error: configuration: unknown key run.max_stepz; did you mean run.max_steps?\n"
    assert streams.out == ""
    assert calls == []


def test_an_error_while_training_exits_the_same_way(in_folder, monkeypatch, capsys):
    def fails(config, launched, **options):
        raise InputError("reward f: it returned [nan] for row 3.")

    monkeypatch.setattr(cli, "_train", fails)
    assert run("train", "run.yaml") == 2
    assert capsys.readouterr().err == "error: reward f: it returned [nan] for row 3.\n"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_an_interrupt_says_what_is_left(in_folder, monkeypatch, capsys, has_checkpoint):
    def interrupted(config, launched, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", interrupted)
    if has_checkpoint:
        (in_folder / "out" / "checkpoints").mkdir(parents=True)
        (in_folder / "out" / "checkpoints" / "latest").write_text("step-000003\n")
    assert run("train", "run.yaml", "--set", "data.rows=my rows.jsonl") == 130
    text = capsys.readouterr().out
    if has_checkpoint:
        assert "the last checkpoint is step-000003" in text
        assert "Go on with: longstraw train run.yaml --set 'data.rows=my rows.jsonl' --resume" in text
    else:
        assert "before the first checkpoint" in text


def test_report_is_written_for_a_folder(in_folder, capsys):
    (in_folder / "out").mkdir()
    (in_folder / "out" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    assert run("report", "out") == 0
    assert capsys.readouterr().out == "out/report.html\n"
    assert (in_folder / "out" / "report.html").is_file()
    assert run("report", "absent") == 2


def test_reward_modules_are_found_in_the_current_folder(in_folder, calls):
    run("train", "run.yaml")
    assert sys.path[0] == str(in_folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_does_not_fit_its_processes_is_told_by_the_first(in_folder, monkeypatch, capsys, rank):
    launched(monkeypatch, rank)
    assert run("train", "run.yaml", "--set", "parallel.context=4") == 2
    told = capsys.readouterr().err
    assert ("is 4 processes, but there are 2; change them, or start torchrun" in told) == (rank == 0)
    assert rank == 0 or not told


def test_a_job_without_torchrun_says_how_to_start_it(in_folder, capsys):
    assert run("train", "run.yaml", "--set", "parallel.context=4") == 2
    assert "torchrun --nproc-per-node 4 -m longstraw train run.yaml" in capsys.readouterr().err


def launched(monkeypatch, rank):
    """As torchrun starts one of two processes."""
    for name, value in (("WORLD_SIZE", 2), ("RANK", rank), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(cli, "SECONDS_TO_TELL", 0.0)


def test_an_interrupted_job_is_gone_on_with_by_torchrun(in_folder, monkeypatch, capsys):
    launched(monkeypatch, 0)

    def interrupted(config, launched, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_train", interrupted)
    (in_folder / "out" / "checkpoints").mkdir(parents=True)
    (in_folder / "out" / "checkpoints" / "latest").write_text("step-000002\n")
    assert run("train", "run.yaml", "--set", "parallel.context=2") == 130
    again = "torchrun --nproc-per-node 2 -m longstraw train run.yaml --set parallel.context=2 --resume"
    assert again in capsys.readouterr().out


def test_a_job_takes_no_single_device(in_folder, monkeypatch, capsys):
    launched(monkeypatch, 0)
    assert run("train", "run.yaml", "--set", "parallel.context=2", "--set", "model.device=cuda:1") == 2
    assert "each of the 2 processes takes one of its own; set it to cuda, cpu or auto" in capsys.readouterr().err
