"""Between text and token ids: prompts through the chat template, completions back, and the ids that end a response.

Apart from the rows because it needs a tokenizer, which is passed in; the only place that calls one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jinja2 import TemplateError

from longstraw.errors import InputError
from longstraw.records import Prompt, Response
from longstraw.training.data import Message, Row

# A text no template inserts on its own; what a template writes right after it is the end of an assistant's turn.
PROBE = "zqxjkv"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None
    chat_template: str | None
    all_special_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str: ...


def prompt_text(tokenizer: Tokenizer, row: Row) -> str:
    """The text the model sees. Messages go through the chat template, which opens the assistant's turn.

    Messages that end with the assistant's are continued, as in TRL. Raises `InputError` naming the row.
    """
    if isinstance(row.prompt, str):
        return row.prompt
    if tokenizer.chat_template is None:
        raise InputError(
            f"data: the prompt of {row.origin} is messages, but the tokenizer has no chat template; give text prompts."
        )
    is_continued = row.prompt[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in row.prompt],
            tokenize=False,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
        )
    except TemplateError as error:
        raise InputError(f"data: the chat template refuses the messages of {row.origin}: {error}") from error


def encode_prompt(tokenizer: Tokenizer, row: Row) -> Prompt:
    """The row's prompt as token ids. A template writes its own special tokens; text gets the tokenizer's."""
    ids = _encode(tokenizer, prompt_text(tokenizer, row), add_special_tokens=not row.is_conversational)
    if not ids:
        raise InputError(f"data: the prompt of {row.origin} has no tokens.")
    return Prompt(ids)


def completion_text(tokenizer: Tokenizer, response: Response) -> str:
    """The response as text, without special tokens."""
    return tokenizer.decode(response.token_ids.tolist(), skip_special_tokens=True)


def count_prompt_tokens(rows: Sequence[Row], tokenizer: Tokenizer) -> list[int]:
    """Encode every prompt once, to find what training would trip over. Raises `InputError` naming the first bad row."""
    return [len(encode_prompt(tokenizer, row)) for row in rows]


def keep_fitting_rows(
    rows: Sequence[Row], num_tokens: Sequence[int], *, max_prompt_tokens: int, limit_is: str, skip_longer: bool
) -> list[Row]:
    """The rows whose prompts, of `num_tokens` each, are within the limit.

    A longer one raises `InputError` that names it and `limit_is` (where the limit comes from), or with `skip_longer`
    is left out; none left raises too.
    """
    fitting = [count <= max_prompt_tokens for count in num_tokens]
    if not skip_longer and not all(fitting):
        first = fitting.index(False)
        raise InputError(
            f"data: the prompt of {rows[first].origin} has {num_tokens[first]:,} tokens, the limit is "
            f"{max_prompt_tokens:,} ({limit_is}); shorten it or set data.long_prompts to skip."
        )
    kept = [row for row, fits in zip(rows, fitting, strict=True) if fits]
    if not kept:
        raise InputError(f"data: every prompt is longer than {max_prompt_tokens:,} tokens ({limit_is}).")
    return kept


def stop_ids(tokenizer: Tokenizer, stops: Sequence[int | str] | None) -> tuple[int, ...]:
    """Token ids that end a response. None: the end of text and, where a chat template shows one, the end of a turn."""
    if stops is None:
        found = [tokenizer.eos_token_id, _end_of_turn_id(tokenizer)]
        ids = tuple(dict.fromkeys(token for token in found if token is not None))
        if not ids:
            raise InputError(
                "sampling.stop: the tokenizer names no end-of-text token; give the ids that end a response."
            )
        return ids
    return tuple(stop if isinstance(stop, int) else _single_token(tokenizer, stop) for stop in stops)


def _single_token(tokenizer: Tokenizer, text: str) -> int:
    ids = _encode(tokenizer, text)
    if len(ids) != 1:
        raise InputError(
            f"sampling.stop: {text!r} is {len(ids)} tokens for this tokenizer; a stop must be one token, or its id."
        )
    return ids[0]


def _end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The special token a template writes after an assistant's message, if it writes one there."""
    if tokenizer.chat_template is None:
        return None
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    except TemplateError:
        return None  # a template for conversations of another form; the end of text remains
    after = text.rpartition(PROBE)[2].lstrip()
    ids = _encode(tokenizer, after)[:1]
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # Not verbose: the warning about texts beyond the tokenizer's own length is not for a program that checks positions.
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
