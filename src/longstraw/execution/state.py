"""The captured prompt as callers hold it: a context manager that frees its bytes on exit, stamped with its policy."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from longstraw.errors import StaleStateError
from longstraw.execution.capture import Captured
from longstraw.execution.chunk import ChunkForward
from longstraw.models.decoder import Decoder
from longstraw.records import Prompt
from longstraw.state.node import NodeState


@dataclass(frozen=True)
class Stamp:
    """Which policy made a state."""

    policy_version: int
    parameter_writes: int  # in-place writes to trained parameters so far, by anyone


class PromptState:
    """The typed state of one prompt. Made by `Engine.capture`; refuses use after `free` or when its policy moved on."""

    def __init__(self, prompt: Prompt, captured: Captured, owner: Decoder, stamp: Stamp) -> None:
        self.prompt = prompt
        self.owner = owner
        self.stamp = stamp
        self._node: NodeState | None = captured.node
        self._last_chunk = captured.last_chunk

    def __enter__(self) -> PromptState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def free(self) -> None:
        """Give all bytes back. Harmless when called twice."""
        if self._node is not None:
            self._node.free()
            self._node = self._last_chunk = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the typed state held now."""
        return 0 if self._node is None else self._node.num_bytes

    def take_last_chunk(self) -> ChunkForward | None:
        """The last chunk's forward, if it was kept; it serves one replay."""
        taken, self._last_chunk = self._last_chunk, None
        return taken

    @property
    def node(self) -> NodeState:
        if self._node is None:
            raise StaleStateError("this prompt state was freed (its `with` block ended); capture the prompt again.")
        return self._node
