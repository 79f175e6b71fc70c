"""Retrieval rows made from the Python standard library's own source: real text, on every machine, without a network.

One comment line, `# The <colour> access code is <4 digits>.`, is hidden at a random place of a stretch of source; the
question at the end asks for it. Training and held-out rows share no file, no colour and no code, so a held-out score
measures finding the line, not remembering it. The same arguments give the same rows on the same Python version.

    python examples/retrieval_rows.py FOLDER_OF_THE_MODEL OUT_FOLDER
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

TRAIN_COLOURS = ("amber", "black", "blue", "brown", "gold", "gray", "green", "orange", "pink", "purple", "red", "white")
HELD_OUT_COLOURS = ("crimson", "cyan", "magenta", "olive", "silver", "yellow")
HELD_OUT_SHARE = 5  # one file and one code in five is held out
MIN_FILE_BYTES = 12_000  # enough source for the longest prompt, from several starting lines

QUESTION = "What is the {colour} access code? Answer with the number only."


class Tokenizer(Protocol):
    """The two methods used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class RetrievalRow:
    """One line of the JSONL file: `prompt` as chat messages, the other fields are columns for the reward function."""

    prompt: list[dict[str, str]]
    answer: str  # the four digits
    colour: str
    source: str  # file of the standard library, relative to its folder
    num_prompt_tokens: int  # after the chat template
    depth: float  # where the line is hidden: 0 the first line of the text, 1 the last


def is_held_out(key: str) -> bool:
    """Whether a file or a code belongs to the held-out side; by checksum, so equal on every machine."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def source_files(folder: Path, *, held_out: bool) -> list[Path]:
    """Long, plain-ASCII modules of the standard library on one side of the split, in a fixed order."""
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size >= MIN_FILE_BYTES)
    files += sorted(path for path in folder.glob("[a-z]*/*.py") if _is_library_module(path, folder))
    return [path for path in files if is_held_out(path.relative_to(folder).as_posix()) == held_out]


def _is_library_module(path: Path, folder: Path) -> bool:
    package = path.relative_to(folder).parts[0]
    if package in {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}:
        return False
    return path.stat().st_size >= MIN_FILE_BYTES
