import json

import datasets
import pytest

from longstraw.errors import InputError
from longstraw.training.data import load_rows, row_order, rows_at

VERL = {
    "data_source": "codes",
    "prompt": [{"role": "user", "content": "Which?"}],
    "ability": "retrieval",
    "reward_model": {"style": "rule", "ground_truth": "41"},
    "extra_info": {"index": 3},
}


def written(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines),
        encoding="utf-8",
    )
    return str(path)


def test_jsonl_rows_keep_prompt_and_free_columns(tmp_path):
    rows = load_rows(
        written(tmp_path, {"prompt": "a", "answer": 1}, "", {"prompt": "b\u2028c", "other": "x"}), split="train"
    )
    assert [row.prompt for row in rows] == ["a", "b\u2028c"]
    assert [row.columns for row in rows] == [{"answer": 1, "other": None}, {"answer": None, "other": "x"}]
    assert rows[1].origin.endswith("rows.jsonl line 3")


def test_verl_rows_are_conversations_with_columns(tmp_path):
    (row,) = load_rows(written(tmp_path, VERL), split="train")
    assert row.is_conversational
    assert row.prompt == ({"role": "user", "content": "Which?"},)
    assert set(row.columns) == {"data_source", "ability", "reward_model", "extra_info"}


def test_columns_whose_meaning_is_taken_are_left_out(tmp_path):
    (row,) = load_rows(written(tmp_path, {"prompt": "a", "completion": "b", "completion_ids": [1]}), split="train")
    assert row.columns == {}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "b"', r"line 2 is not JSON"),
        ("[1]", r"line 2 must be an object"),
        ({"question": "b", "answer": 1}, r"line 2 has no prompt; its columns are: question, answer"),
        ({"prompt": None}, r"line 2 has no prompt"),
        ({"prompt": " \n"}, r"line 2 has an empty prompt"),
        ({"prompt": []}, r"line 2 has an empty prompt"),
        ({"prompt": [{"role": "user", "content": ""}]}, r"line 2 has an empty prompt"),
        ({"prompt": 3}, r"line 2: prompt must be text or a list of messages, got int"),
        ({"prompt": [{"role": "user"}]}, r"line 2: message 0 of the prompt must have a role and a content"),
        ({"prompt": [{"role": "user", "content": "a", "tool_calls": [1]}]}, r"line 2: message 0 .* has tool_calls"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, sentence):
    with pytest.raises(InputError, match=sentence):
        load_rows(written(tmp_path, {"prompt": "a"}, line), split="train")


def test_a_source_without_rows_or_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no rows"):
        load_rows(written(tmp_path, ""), split="train")
    with pytest.raises(InputError, match=r"no file .*absent\.jsonl"):
        load_rows(str(tmp_path / "absent.jsonl"), split="train")
    with pytest.raises(InputError, match=r"no file .*absent\.parquet"):
        load_rows(str(tmp_path / "absent.parquet"), split="train")


@pytest.mark.parametrize("kind", ["json", "parquet", "files", "saved", "splits"])
def test_other_sources_give_the_same_rows(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    records = [VERL, {**VERL, "ability": "other"}]
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(records))
    elif kind == "parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    elif kind == "files":
        path.mkdir()
        (path / "test.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "saved":
        datasets.Dataset.from_list(records).save_to_disk(path)
    else:
        datasets.DatasetDict(test=datasets.Dataset.from_list(records)).save_to_disk(path)
        with pytest.raises(InputError, match="has no split 'train'; it has test"):
            load_rows(str(path), split="train")
    rows = load_rows(str(path), split="test")
    assert [row.columns["ability"] for row in rows] == ["retrieval", "other"]
    assert rows[0].prompt == ({"role": "user", "content": "Which?"},)
    assert rows[0].columns["reward_model"] == {"style": "rule", "ground_truth": "41"}


def test_a_source_that_cannot_be_found_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"rows 'no_such_dataset' \(split 'train'\) cannot be loaded") as caught:
        load_rows("no_such_dataset", split="train")
    assert "\n" not in str(caught.value)


def test_every_epoch_draws_every_row_once_in_its_own_order():
    orders = [row_order(7, epoch=epoch, shuffle_seed=3) for epoch in range(3)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert orders[0] != orders[1]
    assert row_order(7, epoch=1, shuffle_seed=3) == orders[1]
    assert row_order(7, epoch=1, shuffle_seed=None) == list(range(7))


def test_draws_do_not_depend_on_how_they_are_cut_into_steps():
    rows = list("abcde")
    whole = rows_at(rows, 0, 12, shuffle_seed=1)
    parts = [row for start in range(0, 12, 3) for row in rows_at(rows, start, 3, shuffle_seed=1)]
    assert parts == whole
    assert sorted(whole[:5]) == sorted(whole[5:10]) == rows
