"""Retrieval rows made from the Python standard library's own source: real text, on every machine, without a network.

One comment line, `# The <colour> access code is <4 digits>.`, is hidden at a random place in a stretch of source. The
question at the end asks for it, and the first words of the answer are given. Training and held-out rows share no file,
no colour and no code, so a held-out score measures finding the line, not remembering it. The same arguments give the
same rows on the same Python version.
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
MIN_FILE_BYTES = 16_000  # room for different stretches of the longest prompt
NOT_LIBRARY = ("test", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages")

QUESTION = "What is the {colour} access code?"
# The assistant's turn begins with these words and the model goes on. Asked without them it starts with anything, bare
# codes are hardly ever sampled, and what is never sampled cannot be rewarded.
OPENING = "The {colour} access code is"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, continue_final_message: bool
    ) -> str: ...


@dataclass(frozen=True)
class RetrievalRow:
    """One line of the JSONL file; the fields beside `prompt` are columns for reward functions.

    `prompt` is text, the chat template already applied, and not messages: rewards of messages see the opening words as
    a part of the answer (TRL's convention), and here the answer is what follows them.
    """

    prompt: str
    answer: str  # four digits
    colour: str
    source: str  # file of the standard library, relative to its folder
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
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = source_files(folder, held_out=held_out)
    rows: list[RetrievalRow] = []
    while len(rows) < num_rows:
        source = rng.choice(sources)
        num_tokens = rng.randint(min_tokens, max_tokens)
        colour = rng.choice(HELD_OUT_COLOURS if held_out else TRAIN_COLOURS)
        code = _draw_code(rng, held_out=held_out)
        frame = _prompt(tokenizer, [f"# The {colour} access code is {code}.\n"], colour)
        room = num_tokens - _count_tokens(tokenizer, frame)
        lines = _stretch((folder / source).read_text("ascii"), rng, tokenizer=tokenizer, room=room)
        place = rng.randint(0, len(lines))
        lines.insert(place, f"# The {colour} access code is {code}.\n")
        prompt = _prompt(tokenizer, lines, colour)
        count = _count_tokens(tokenizer, prompt)
        # Too short: the file ended. The code must be findable by the question alone.
        if min_tokens <= count <= max_tokens and "".join(lines).count(code) == 1:
            rows.append(RetrievalRow(prompt, code, colour, source, count, place / (len(lines) - 1)))
    return rows


def write_rows(path: Path, rows: Sequence[RetrievalRow]) -> None:
    """One JSON object a line, written aside and renamed, so that a file that exists is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    aside.replace(path)


def is_held_out(key: str) -> bool:
    """Whether a file or a code is on the held-out side: by checksum, so the same on every machine."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def source_files(folder: Path, *, held_out: bool) -> list[str]:
    """Long plain-ASCII modules on one side of the split, relative to the standard library's folder, sorted."""
    paths = [*folder.glob("*.py"), *(path for path in folder.glob("*/*.py") if path.parent.name not in NOT_LIBRARY)]
    return sorted(
        name
        for path in paths
        if is_held_out(name := path.relative_to(folder).as_posix()) == held_out
        and path.stat().st_size >= MIN_FILE_BYTES
        and path.read_bytes().isascii()
        and not path.name.startswith("_sysconfigdata")  # written when Python was built, another on every machine
    )


def _draw_code(rng: random.Random, *, held_out: bool) -> str:
    while True:
        code = str(rng.randint(1000, 9999))
        if is_held_out(code) == held_out:
            return code


def _stretch(text: str, rng: random.Random, *, tokenizer: Tokenizer, room: int) -> list[str]:
    """Whole lines from a random one on, of about `room` tokens together."""
    lines = text.splitlines(keepends=True)
    first = rng.randrange(len(lines))
    used = 0
    for last, line in enumerate(lines[first:], start=first):
        used += len(tokenizer.encode(line, add_special_tokens=False))
        if used > room:
            return lines[first:last]
    return lines[first:]


def _prompt(tokenizer: Tokenizer, lines: Sequence[str], colour: str) -> str:
    messages = [
        {"role": "user", "content": f"{''.join(lines)}\n{QUESTION.format(colour=colour)}"},
        {"role": "assistant", "content": OPENING.format(colour=colour)},
    ]
    return tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)


def _count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))
