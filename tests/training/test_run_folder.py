import json

import pytest

from longstraw.errors import InputError
from longstraw.training.run_folder import open_new, open_resumed, refuse_used_folder


def test_a_new_run_refuses_a_folder_with_anything_in_it(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty; give another folder"):
        open_new(tmp_path, "a: 1")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000001")
    with pytest.raises(InputError, match="go on with it by --resume"):
        refuse_used_folder(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        refuse_used_folder(tmp_path / "notes.txt")


def test_refusing_creates_nothing(tmp_path):
    refuse_used_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_resuming_cuts_logs_to_the_step_and_keeps_what_it_cuts(tmp_path):
    folder = open_new(tmp_path / "run", "a: 1")
    for step in (1, 2, 3):
        folder.append("metrics", {"step": step})
        folder.append("completions", {"step": step, "completion": "a\u2028b\n"})
        folder.append("completions", {"step": step, "completion": "a\u2028b\n"})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')  # a kill while writing
    open_resumed(folder.path, "a: 1", step=2)

    def steps(name):
        return [json.loads(line)["step"] for line in (folder.path / name).read_text().splitlines()]

    assert steps("metrics.jsonl") == [1, 2]
    assert steps("completions.jsonl") == [1, 1, 2, 2]
    assert (folder.path / "metrics.cut.jsonl").read_text() == '{"step": 3}\n{"step": 4, "los\n'
    assert len((folder.path / "completions.cut.jsonl").read_text().splitlines()) == 2


def test_resuming_with_other_settings_keeps_the_old_ones(tmp_path):
    folder = open_new(tmp_path / "run", "a: 1")
    open_resumed(folder.path, "a: 2", step=3)
    open_resumed(folder.path, "a: 3", step=3)
    open_resumed(folder.path, "a: 3", step=3)
    texts = {path.name: path.read_text() for path in folder.path.iterdir()}
    assert texts == {
        "config.yaml": "a: 3",
        "config-until-step-000003.yaml": "a: 1",
        "config-until-step-000003-2.yaml": "a: 2",
    }


def test_flush_needs_no_log_to_be_there(tmp_path):
    folder = open_new(tmp_path / "run", "")
    folder.flush()
    folder.append("metrics", {"step": 1, "loss": 0.5})
    folder.flush()
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'


def test_a_run_that_failed_before_its_first_step_may_start_anew(tmp_path):
    open_new(tmp_path / "run", "a: 1")
    assert (open_new(tmp_path / "run", "a: 2").path / "config.yaml").read_text() == "a: 2"
    open_new(tmp_path / "run", "a: 2").append("metrics", {"step": 1})
    with pytest.raises(InputError, match="is not empty"):
        open_new(tmp_path / "run", "a: 3")
