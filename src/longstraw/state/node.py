"""State of one node of the tree, all layers together: what its children and its own replay need from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.ops.attention import KeyRun
from longstraw.state.key_value import KeyValueState
from longstraw.state.recurrent import Boundary, RecurrentState

LayerState = KeyValueState | RecurrentState


@dataclass(frozen=True)
class Chunk:
    """Tokens begin to end of a node, the unit of execution."""

    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


class NodeState:
    """Owns the typed state of its tokens; refers to its parent for the rest of the path.

    `constant`: nothing is pulled back through the node (the prompt under `stopped`, or anything that is only scored),
    so it keeps neither chunk boundaries nor keys beyond a window. `last_hidden` `[1, E]` (before the final norm)
    predicts the first token of every child; `d_last_hidden` collects what they send back.
    """

    def __init__(
        self,
        token_ids: Tensor,  # int64 [T], on the model's device
        parent: NodeState | None,
        *,
        chunk_tokens: int,
        windows: Sequence[int | None],
        recurrent: Sequence[bool],
        constant: bool,
    ) -> None:
        self.token_ids = token_ids
        self.parent = parent
        self.constant = constant
        self.chunk_tokens = chunk_tokens
        self.start: int = 0 if parent is None else parent.end
        self.chunks = [
            Chunk(begin, min(begin + chunk_tokens, len(token_ids))) for begin in range(0, len(token_ids), chunk_tokens)
        ]
        self.layers: list[LayerState] = [
            self._layer_state(index, windows[index], is_recurrent) for index, is_recurrent in enumerate(recurrent)
        ]
        self.last_hidden: Tensor | None = None
        self.d_last_hidden: Tensor | None = None
        self.received_cotangent = False  # whether any later token or child sent something to pull back

    def _layer_state(self, index: int, window: int | None, is_recurrent: bool) -> LayerState:
        if is_recurrent:
            begin = Boundary() if self.parent is None else self.parent.recurrent(index).end
            return RecurrentState(begin, keep_starts=not self.constant)
        keep = max(1, window - 1) if window is not None and self.constant else None
        return KeyValueState(start=self.start, num_tokens=len(self.token_ids), keep_tokens=keep)

    @property
    def end(self) -> int:
        """Position after the node's last token."""
        return self.start + len(self.token_ids)

    def recurrent(self, layer: int) -> RecurrentState:
        state = self.layers[layer]
        assert isinstance(state, RecurrentState), f"layer {layer} is not recurrent"
        return state

    def key_value(self, layer: int) -> KeyValueState:
        state = self.layers[layer]
        assert isinstance(state, KeyValueState), f"layer {layer} has no keys"
        return state

    def path(self) -> list[NodeState]:
        """Root first, this node last."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def runs_before(self, layer: int, chunk: Chunk) -> list[KeyRun]:
        """The keys of the path before a chunk of this node, oldest first."""
        ancestors = [run for node in self.path()[:-1] for run in node.key_value(layer).run()]
        own = self.key_value(layer)
        return ancestors + own.run(None if self.constant else chunk.begin)

    def runs(self, layer: int) -> list[KeyRun]:
        """The keys of the whole path."""
        return [run for node in self.path() for run in node.key_value(layer).run()]

    def open_cotangents(self, *, has_children: bool) -> None:
        """Before replay: buffers for what later chunks of the node and, if it has any, its children will send."""
        for state in self.layers:
            if has_children or (isinstance(state, KeyValueState) and len(self.chunks) > 1):
                state.open_cotangents()
        assert self.last_hidden is not None, "captured before it is replayed"
        self.d_last_hidden = torch.zeros_like(self.last_hidden)
        self.received_cotangent = False

    def close_cotangents(self) -> None:
        for state in self.layers:
            state.close_cotangents()
        self.d_last_hidden = None

    def free(self) -> None:
        """Drop every tensor the node owns."""
        self.layers = []
        self.last_hidden = self.d_last_hidden = None

    @property
    def num_bytes(self) -> int:
        hidden = [tensor for tensor in (self.last_hidden, self.d_last_hidden) if tensor is not None]
        return sum(state.num_bytes for state in self.layers) + sum(t.numel() * t.element_size() for t in hidden)
