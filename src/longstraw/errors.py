"""The one error family. User mistakes are also `ValueError`, so callers may catch either."""


class LongStrawError(Exception):
    """Base of every error LongStraw raises on purpose; its text is one sentence a user can act on."""


class InputError(LongStrawError, ValueError):
    """A row, record, field or setting is wrong. The message names it and says what would be right."""


class UnsupportedError(LongStrawError, ValueError):
    """A model or feature is outside what LongStraw supports. Says what was asked, what works, what to change."""


class StaleStateError(LongStrawError, RuntimeError):
    """A state was captured by an older policy than the one it is used with."""


class JointError(LongStrawError):
    """An error that all ranks of a job raise alike, so that one of them can tell of it and all of them end."""
