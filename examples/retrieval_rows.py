"""Retrieval rows made from the Python standard library's own source: real text, on every machine, without a network.

One comment line, `# The <colour> access code is <4 digits>.`, is hidden at a random place in a stretch of source; the
question at the end asks for it. Training and held-out rows share no file, no colour and no code, so a held-out score
measures finding the line, not remembering it. The same arguments give the same rows on the same Python version.
"""

from __future__ import annotations

import json
import os
import random
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

TRAIN_COLOURS = ("amber", "black", "blue", "brown", "gold", "gray", "green", "orange", "pink", "purple", "red", "white")
HELD_OUT_COLOURS = ("crimson", "cyan", "lime", "magenta", "silver", "yellow")
HELD_OUT_SHARE = 4  # one file and one code in so many is held out
MIN_FILE_BYTES = 16_000  # several different stretches of the longest prompt
NOT_LIBRARY = {"test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}

QUESTION = "What is the {colour} access code? Answer with the number only."


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class RetrievalRow:
    """One line of the JSONL file: `prompt` as chat messages; the other fields are columns for reward functions."""

    prompt: list[dict[str, str]]
    answer: str  # four digits
    colour: str
    source: str  # file of the standard library
    num_prompt_tokens: int  # with the chat template's own
    depth: float  # where the line is hidden: 0 before the first line of source, 1 after the last


def make_rows(
    num_rows: int,
    seed: int,
    *,
    tokenizer: Tokenizer,
    held_out: bool,
    min_tokens: int = 1024,
    max_tokens: int = 2048,
) -> list[RetrievalRow]:
    """Rows whose prompts have `min_tokens` to `max_tokens` tokens, evenly spread; a function of its arguments."""
    rng = random.Random(f"{seed}/{held_out}")
    files = source_files(held_out=held_out)
    rows: list[RetrievalRow] = []
    while len(rows) < num_rows:
        path = rng.choice(files)
        row = _hide_code(path.read_text("ascii"), path.name, rng, tokenizer=tokenizer, held_out=held_out, num_tokens=rng.randint(min_tokens, max_tokens))
        if row is not None and min_tokens <= row.num_prompt_tokens <= max_tokens:
            rows.append(row)
    return rows
