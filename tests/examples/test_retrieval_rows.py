"""The demo's rows: what is hidden can be found, lengths hold, and held-out rows share nothing with training rows."""

import re

import pytest

import retrieval_rows
from longstraw.training.data import load_rows
from retrieval_rows import OPENING, QUESTION, is_held_out, make_rows, write_rows

HIDDEN = re.compile(r"# The (\w+) access code is (\d{4})\.")


class WordTokenizer:
    """A token a word or line end, so that lengths are cheap to count; the template adds three."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens, "the chat template writes its own"
        return [len(word) for word in re.findall(r"\S+|\n", text)]

    def apply_chat_template(self, conversation, *, tokenize, continue_final_message):
        assert not tokenize
        assert continue_final_message
        user, assistant = conversation
        return f"<user> {user['content']} <end> <assistant> {assistant['content']}"


TOKENIZER = WordTokenizer()


@pytest.fixture(scope="module")
def rows():
    return {
        held_out: make_rows(12, 3, tokenizer=TOKENIZER, held_out=held_out, min_tokens=200, max_tokens=301)
        for held_out in (False, True)
    }


def test_the_asked_code_stands_in_the_text_once_with_its_colour(rows):
    for row in [*rows[False], *rows[True]]:
        text = row.prompt
        assert HIDDEN.findall(text) == [(row.colour, row.answer)]
        assert text.count(row.answer) == 1
        question, opening = text.rpartition("\n\n")[2], text.rpartition("\n")[2]
        assert row.colour in question and row.colour in opening
        assert row.answer not in question and row.answer not in opening
        assert text.endswith(OPENING.format(colour=row.colour))


def test_every_prompt_has_a_length_within_the_limits(rows):
    lengths = []
    for row in [*rows[False], *rows[True]]:
        assert len(TOKENIZER.encode(row.prompt, add_special_tokens=False)) == row.num_prompt_tokens
        lengths.append(row.num_prompt_tokens)
    assert min(lengths) >= 200
    assert max(lengths) <= 301
    assert max(lengths) - min(lengths) > 50


def test_depth_says_where_the_line_is(rows):
    for row in rows[False]:
        before_question = row.prompt.partition(f"\n{QUESTION.format(colour=row.colour)}")[0]
        lines = before_question.removeprefix("<user> ").splitlines()
        (place,) = (index for index, line in enumerate(lines) if HIDDEN.fullmatch(line))
        assert row.depth == place / (len(lines) - 1)
    assert max(row.depth for row in rows[False]) > 0.6
    assert min(row.depth for row in rows[False]) < 0.4


@pytest.mark.parametrize("field", ["source", "colour", "answer"])
def test_held_out_rows_share_nothing_with_training_rows(rows, field):
    train, held_out = ({getattr(row, field) for row in rows[side]} for side in (False, True))
    assert len(train) > 2
    assert len(held_out) > 2
    assert not train & held_out


def test_codes_are_split_like_files(rows):
    assert all(is_held_out(row.answer) for row in rows[True])
    assert not any(is_held_out(row.answer) for row in rows[False])


def test_code_that_stands_in_the_source_already_is_not_hidden_there(monkeypatch, tmp_path):
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text("port = 1234\n" * 2_000)
    monkeypatch.setattr(retrieval_rows.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(retrieval_rows, "_draw_code", lambda rng, held_out: rng.choice(["1234", "5678"]))
    rows = make_rows(6, 0, tokenizer=TOKENIZER, held_out=False, min_tokens=200, max_tokens=301)
    assert {row.answer for row in rows} == {"5678"}


def test_same_arguments_give_the_same_rows_and_another_seed_others(rows):
    again = make_rows(12, 3, tokenizer=TOKENIZER, held_out=True, min_tokens=200, max_tokens=301)
    assert again == rows[True]
    other = make_rows(12, 4, tokenizer=TOKENIZER, held_out=True, min_tokens=200, max_tokens=301)
    assert not {row.answer for row in other} >= {row.answer for row in again}


def test_more_rows_begin_with_the_fewer(rows):
    assert make_rows(5, 3, tokenizer=TOKENIZER, held_out=False, min_tokens=200, max_tokens=301) == rows[False][:5]


def test_written_rows_are_rows_the_trainer_reads(rows, tmp_path):
    path = tmp_path / "deeper" / "train.jsonl"
    write_rows(path, rows[False])
    read = load_rows(str(path), split="train")
    assert [row.columns["answer"] for row in read] == [row.answer for row in rows[False]]
    assert [row.prompt for row in read] == [row.prompt for row in rows[False]]
    assert [file.name for file in path.parent.iterdir()] == ["train.jsonl"]
