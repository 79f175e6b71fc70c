"""Rows: read, checked as a whole before training, and turned into prompts of token ids.

A row is what TRL and verl mean by it: a `prompt` (text, or chat messages) and free columns that reward functions read.
verl rows (`data_source, prompt, ability, reward_model, extra_info`) need nothing special: their prompt is messages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets

from longstraw.errors import InputError

Message = Mapping[str, str]

# TRL passes neither of these on: the arguments of a reward function have these meanings already.
RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")
MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True)
class Row:
    """One row, checked: its prompt is not empty. `columns` are all others, the same names in every row of a source."""

    index: int  # position among the source's rows, from 0
    origin: str  # what errors call it: "rows.jsonl line 4" or "row 3 of org/name"
    prompt: str | tuple[Message, ...]
    columns: Mapping[str, object]

    @property
    def is_conversational(self) -> bool:
        return not isinstance(self.prompt, str)


def load_rows(source: str, *, split: str) -> list[Row]:
    """All rows of a JSONL, JSON or parquet file, a folder, or a dataset on the hub.

    Raises `InputError` naming the source, or the first row with broken JSON or without a usable prompt.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        records = _jsonl_records(path)
    elif path.suffix == ".json":
        records = _json_records(path)
    else:
        records = _dataset_records(source, split)
    if not records:
        raise InputError(f"data: {source} has no rows.")
    return _with_equal_columns([_row(index, origin, record) for index, (origin, record) in enumerate(records)])


def row_order(num_rows: int, *, epoch: int, shuffle_seed: int | None) -> list[int]:
    """The order of one epoch: a function of its arguments only, so that a resumed run sees the same. None: as read."""
    order = list(range(num_rows))
    if shuffle_seed is not None:
        random.Random(f"{shuffle_seed}/{epoch}").shuffle(order)
    return order


def rows_at(rows: Sequence[Row], position: int, count: int, *, shuffle_seed: int | None) -> list[Row]:
    """The next `count` rows after `position` rows were drawn; runs over into the next epoch."""
    drawn: list[Row] = []
    epoch, order = -1, list[int]()
    for place in range(position, position + count):
        if place // len(rows) != epoch:
            epoch = place // len(rows)
            order = row_order(len(rows), epoch=epoch, shuffle_seed=shuffle_seed)
        drawn.append(rows[order[place % len(rows)]])
    return drawn


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"data: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data: {path} cannot be read as UTF-8 text ({error}).") from None


def _jsonl_records(path: Path) -> list[tuple[str, object]]:
    records: list[tuple[str, object]] = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path} line {number}"
        try:
            records.append((origin, json.loads(line)))
        except json.JSONDecodeError as error:
            raise InputError(f"data: {origin} is not JSON ({error.msg} at column {error.colno}).") from None
    return records


def _json_records(path: Path) -> list[tuple[str, object]]:
    try:
        items = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"data: {path} is not JSON ({error.msg} at line {error.lineno}).") from None
    if not isinstance(items, list):
        raise InputError(f"data: {path} must hold a list of rows; a file with one row a line is named .jsonl.")
    return [(f"row {index} of {path}", item) for index, item in enumerate(items)]


def _dataset_records(source: str, split: str) -> list[tuple[str, object]]:
    """Rows of anything else, through the `datasets` library."""
    path = Path(source)
    try:
        if path.suffix == ".parquet":
            if not path.is_file():
                raise InputError(f"data: there is no file {path}.")
            found = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif (path / "state.json").is_file():
            found = datasets.load_from_disk(source)
        elif (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(source)
            if split not in splits:
                raise InputError(f"data: {source} has no split {split!r}; it has {', '.join(splits)}.")
            found = splits[split]
        else:
            found = datasets.load_dataset(source, split=split)
    except InputError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"data: rows {source!r} (split {split!r}) cannot be loaded: {problem}") from error
    return [(f"row {index} of {source}", record) for index, record in enumerate(found)]


def _row(index: int, origin: str, record: object) -> Row:
    if not isinstance(record, dict):
        raise InputError(f"data: {origin} must be an object with a prompt, got {type(record).__name__}.")
    if record.get("prompt") is None:
        names = ", ".join(map(str, record)) or "none"
        raise InputError(f"data: {origin} has no prompt; its columns are: {names}.")
    columns = {str(name): value for name, value in record.items() if name not in RESERVED_COLUMNS}
    return Row(index, origin, _checked_prompt(record["prompt"], origin), columns)


def _checked_prompt(prompt: object, origin: str) -> str | tuple[Message, ...]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError(f"data: {origin} has an empty prompt.")
        return prompt
    if not isinstance(prompt, list):
        raise InputError(f"data: {origin}: prompt must be text or a list of messages, got {type(prompt).__name__}.")
    if not prompt:
        raise InputError(f"data: {origin} has an empty prompt (no messages).")
    messages: list[Message] = []
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in MESSAGE_KEYS):
            raise InputError(
                f"data: {origin}: message {len(messages)} of the prompt must have a role and a content, both text."
            )
        unusable = [key for key, value in message.items() if value is not None and not isinstance(value, str)]
        if unusable:
            raise InputError(
                f"data: {origin}: message {len(messages)} of the prompt has {unusable[0]}; only text is supported."
            )
        messages.append({key: value for key, value in message.items() if value is not None})
    if not any(message["content"].strip() for message in messages):
        raise InputError(f"data: {origin} has an empty prompt (no message has content).")
    return tuple(messages)


def _with_equal_columns(rows: list[Row]) -> list[Row]:
    """A column that some rows lack is None there, as `datasets` has it."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    return [replace(row, columns={name: row.columns.get(name) for name in names}) for row in rows]
