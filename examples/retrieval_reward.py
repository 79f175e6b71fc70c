"""The demo's reward: a way up from any answer to the bare code.

Apart from the built-in rewards because it is made for one task, and as the example of a reward function of one's own:
keyword arguments in (TRL's conventions: the completions and every column of the row), one number a response out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

Completion = str | Sequence[Mapping[str, str]]

NUMBER = re.compile(r"\d{4}\.?")
CONTAINS, BREVITY = 0.3, 0.4
FORM, PER_DIGIT = 0.1, 0.1


def bare_code(completions: Sequence[Completion], answer: Sequence[str]) -> list[float]:
    """1 for the code and nothing else; less for the code among other words; a little for another four-digit number.

    At first the model goes on with "7893. It is used to ..." or with other words altogether, and hardly ever ends right
    after the code. So a response with the code earns more the shorter it is, and a wrong number earns for its form and
    its first digits: every digit that was read from the prompt is a step towards reading all four.
    """
    return [_score(_text(completion), code) for completion, code in zip(completions, answer, strict=True)]


def _score(text: str, code: str) -> float:
    if text == code:
        return 1.0
    if code in text:
        return CONTAINS + BREVITY * len(code) / len(text)
    if NUMBER.fullmatch(text):
        return FORM + PER_DIGIT * _num_first_digits(text, code)
    return 0.0


def _num_first_digits(text: str, code: str) -> int:
    """How many characters the two have in common from the left."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, code, strict=False)))


def _text(completion: Completion) -> str:
    parts = [completion] if isinstance(completion, str) else [message["content"] for message in completion]
    return "".join(parts).strip()
