"""A few reward functions that need no code. They read like a user's: TRL's arguments in, one number a response out.

The reference answer is the column `answer` or, in verl rows, `reward_model["ground_truth"]`; a row without one gets
None (not applicable).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from longstraw.errors import InputError
from longstraw.training.data import Message

Completion = str | Sequence[Message]


def exact_match(
    completions: Sequence[Completion],
    answer: Sequence[object] | None = None,
    reward_model: Sequence[Mapping[str, object] | None] | None = None,
) -> list[float | None]:
    """1 if the response, stripped, is the answer and nothing else; 0 otherwise."""
    return [
        None if truth is None else float(text == truth)
        for text, truth in zip(_texts(completions), _truths("exact_match", answer, reward_model), strict=True)
    ]


def contains_answer(
    completions: Sequence[Completion],
    answer: Sequence[object] | None = None,
    reward_model: Sequence[Mapping[str, object] | None] | None = None,
) -> list[float | None]:
    """1 if the answer occurs in the response; 0 otherwise."""
    return [
        None if truth is None else float(truth in text)
        for text, truth in zip(_texts(completions), _truths("contains_answer", answer, reward_model), strict=True)
    ]


def answer_length_shaped(
    completions: Sequence[Completion],
    answer: Sequence[object] | None = None,
    reward_model: Sequence[Mapping[str, object] | None] | None = None,
    base: float = 0.2,
    span: float = 0.6,
) -> list[float | None]:
    """1 if the response is the answer and nothing else, 0 without the answer; in between, the shorter the better.

    A response that contains the answer gets `base + span * answer characters / response characters`: a way up from
    full sentences to the bare answer, for policies that never sample the bare answer by themselves.
    """
    rewards: list[float | None] = []
    for text, truth in zip(_texts(completions), _truths("answer_length_shaped", answer, reward_model), strict=True):
        if truth is None:
            rewards.append(None)
        elif text == truth:
            rewards.append(1.0)
        elif truth in text:
            rewards.append(base + span * len(truth) / len(text))
        else:
            rewards.append(0.0)
    return rewards


def regex_match(completions: Sequence[Completion], pattern: str) -> list[float]:
    """1 if the whole stripped response matches the pattern (`.` also matches line ends), for example a format."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InputError(
            f"reward regex_match: the pattern {pattern!r} is not a regular expression ({error})."
        ) from None
    return [float(compiled.fullmatch(text) is not None) for text in _texts(completions)]


BUILTIN_REWARDS = {
    function.__name__: function for function in (exact_match, contains_answer, answer_length_shaped, regex_match)
}


def _texts(completions: Sequence[Completion]) -> list[str]:
    return [
        (completion if isinstance(completion, str) else "".join(message["content"] for message in completion)).strip()
        for completion in completions
    ]


def _truths(
    name: str, answer: Sequence[object] | None, reward_model: Sequence[Mapping[str, object] | None] | None
) -> list[str | None]:
    if answer is not None:
        truths = list(answer)
    elif reward_model is not None:
        truths = [None if model is None else model.get("ground_truth") for model in reward_model]
    else:
        raise InputError(f"reward {name}: the rows need a column `answer`, or `reward_model` with a ground_truth.")
    return [None if truth is None else str(truth).strip() for truth in truths]
