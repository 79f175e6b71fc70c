import json
import math

from longstraw.report.run_folder import read_run_folder


def write(folder, name, *lines):
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_step_repeated_after_a_resume_counts_once(tmp_path):
    write(tmp_path, "metrics.jsonl", '{"step": 1, "loss": 1}', '{"step": 2, "loss": 2}', '{"step": 2, "loss": 3}')
    table = read_run_folder(tmp_path).metrics
    assert table.steps == (1, 2)
    assert table.column("loss") == (1.0, 3.0)


def test_broken_lines_are_named_and_the_rest_is_kept(tmp_path):
    write(
        tmp_path, "metrics.jsonl", '{"step": 1, "loss": 1}', '{"step": 2, "lo', "[3]", "", '{"loss": 4}', '{"step": 5}'
    )
    run = read_run_folder(tmp_path)
    assert run.metrics.steps == (1, 5)
    assert math.isnan(run.metrics.column("loss")[1])
    assert "metrics.jsonl, line 2, is not a JSON object and was left out." in run.notes
    assert "metrics.jsonl, line 3, is not a JSON object and was left out." in run.notes
    assert "metrics.jsonl: 1 lines have no step and were left out." in run.notes


def test_column_that_is_nowhere_is_all_gaps(tmp_path):
    write(tmp_path, "metrics.jsonl", '{"step": 1, "loss": 1}')
    table = read_run_folder(tmp_path).metrics
    assert table.finite("kl") == []
    assert len(table.column("kl")) == 1


def test_names_inside_keys(tmp_path):
    row = {"step": 1, "memory/peak_bytes": 1, "memory/replay_peak_bytes": 2, "memory/prompt_replay_peak_bytes": 3}
    write(tmp_path, "metrics.jsonl", json.dumps(row))
    assert read_run_folder(tmp_path).metrics.keys_between("memory/", "_peak_bytes") == ["replay", "prompt_replay"]


def test_line_separators_inside_a_completion_do_not_split_it(tmp_path):
    write(tmp_path, "completions.jsonl", json.dumps({"step": 1, "completion": "a\u2028b\x85c"}, ensure_ascii=False))
    assert [completion.text for completion in read_run_folder(tmp_path).completions] == ["a\u2028b\x85c"]


def test_bad_configuration_is_shown_as_text(tmp_path):
    write(tmp_path, "config.yaml", "model: [")
    run = read_run_folder(tmp_path)
    assert run.config == {}
    assert run.config_text == "model: [\n"
    assert run.setting("model.name") is None
    assert "config.yaml is not valid YAML; its text is shown as it is." in run.notes


def test_counts_beside_a_score_are_not_scores(tmp_path):
    row = {"step": 0, "num_rows": 4, "exact_match": 0.5, "completions/mean_length": 9.0}
    write(tmp_path, "evaluations.jsonl", json.dumps(row))
    assert read_run_folder(tmp_path).score_names == ["exact_match"]
