"""One sentence out of what went wrong: a library's error, a long list of names, a misspelt one.

Apart because loading, adapters, presets and tiny models refuse in the same words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from longstraw.errors import InputError

MAX_LISTED = 12


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Turn what the libraries raise for a name, file or setting that does not work into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problem = " ".join(str(error).split())
        first = re.split(r"(?<=[a-z)'\"])\. ", problem, maxsplit=1)[0].rstrip(".")
        raise InputError(f"{what} cannot be loaded: {first or type(error).__name__}.") from error


def listed(names: Sequence[str]) -> str:
    """The names in a row, the first dozen of many."""
    shown = ", ".join(names[:MAX_LISTED]) or "none"
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more"


def nearest_hint(name: str, known: Collection[str]) -> str:
    """The end of a sentence: "; did you mean x?" if some known name is close, else its full stop."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."
