"""State of one node of the tree, all layers together: what its children and its own replay need from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from longstraw.ops.attention import ChunkKeys, KeyRun
from longstraw.ops.index_scan import IndexRun
from longstraw.ops.staging import Passage
from longstraw.state.key_value import KeyValueState
from longstraw.state.kinds import KeyValueKind, LatentKind, LayerKind, RecurrentKind
from longstraw.state.latent import LatentState
from longstraw.state.recurrent import Boundary, RecurrentState
from longstraw.state.residency import ON_DEVICE, Residency

LayerState = KeyValueState | RecurrentState | LatentState
# What passes over the state of earlier tokens: a layer's forward, its backward, or at replay what it takes of both.
Reader = Literal["forward", "backward", "replay"]


@dataclass(frozen=True)
class Chunk:
    """Tokens begin to end of a node, the unit of execution.

    Where a chunk is divided over ranks, this one keeps the state of some of its tokens: `own_begin` to `own_end` of all
    that it keeps of the node, in position order. One process keeps all.
    """

    begin: int
    end: int
    own_begin: int
    own_end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def num_own_tokens(self) -> int:
        return self.own_end - self.own_begin


class NodeState:
    """Owns the typed state of its tokens; refers to its parent for the rest of the path.

    `constant`: nothing is pulled back through the node (the prompt under `stopped`, or anything that is only scored),
    so it keeps neither chunk boundaries nor keys beyond a window. `last_hidden` `[1, E]` (before the final norm)
    predicts the first token of every child; `d_last_hidden` collects what they send back. What grows with the tokens
    lies where `residency` says.
    """

    def __init__(
        self,
        token_ids: Tensor,  # int64 [T], on the model's device
        parent: NodeState | None,
        *,
        chunk_tokens: int,
        num_own_tokens: Sequence[int],  # of each chunk: those whose state this rank keeps
        own_in_window: Callable[[int], int],  # the most of them among so many tokens before any chunk's end
        kinds: Sequence[LayerKind],
        constant: bool,
        residency: Residency = ON_DEVICE,
    ) -> None:
        self.token_ids = token_ids
        self.parent = parent
        self.constant = constant
        self.residency = residency
        self.chunk_tokens = chunk_tokens
        self.start: int = 0 if parent is None else parent.end
        ends = [0, *accumulate(num_own_tokens)]
        self.chunks = [
            Chunk(begin, min(begin + chunk_tokens, len(token_ids)), ends[index], ends[index + 1])
            for index, begin in enumerate(range(0, len(token_ids), chunk_tokens))
        ]
        self._num_own_tokens = ends[-1]
        self._own_in_window = own_in_window
        self._kinds = kinds
        self.layers: list[LayerState] = [self._layer_state(index, kind) for index, kind in enumerate(kinds)]
        self.last_hidden: Tensor | None = None
        self.d_last_hidden: Tensor | None = None
        self.received_cotangent = False  # whether any later token or child sent something to pull back

    def _layer_state(self, index: int, kind: LayerKind) -> LayerState:
        match kind:
            case RecurrentKind():
                begin = Boundary() if self.parent is None else self.parent.recurrent(index).end
                return RecurrentState(begin, keep_starts=not self.constant, residency=self.residency)
            case LatentKind():
                return LatentState(start=self.start, num_tokens=self._num_own_tokens, residency=self.residency)
            case KeyValueKind(window):
                keep = max(1, self._own_in_window(window - 1)) if window is not None and self.constant else None
                num_tokens = self._num_own_tokens
                return KeyValueState(
                    start=self.start, num_tokens=num_tokens, keep_tokens=keep, residency=self.residency
                )

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

    def latent(self, layer: int) -> LatentState:
        state = self.layers[layer]
        assert isinstance(state, LatentState), f"layer {layer} has no latents"
        return state

    def path(self) -> list[NodeState]:
        """Root first, this node last."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def runs_before(self, layer: int, chunk: Chunk) -> list[KeyRun]:
        """The keys, or the rows of latents, of the path before a chunk of this node, oldest first."""
        ancestors = [run for node in self.path()[:-1] for run in node._attended(layer).run()]
        return ancestors + self._attended(layer).run(self._own_end(chunk))

    def index_runs_before(self, layer: int, chunk: Chunk) -> list[IndexRun]:
        """The index keys of the same tokens."""
        ancestors = [run for node in self.path()[:-1] for run in node.latent(layer).index_run()]
        return ancestors + self.latent(layer).index_run(self._own_end(chunk))

    def runs(self, layer: int) -> list[KeyRun]:
        """The keys, or the rows of latents, of the whole path."""
        return [run for node in self.path() for run in node._attended(layer).run()]

    def index_runs(self, layer: int) -> list[IndexRun]:
        """The index keys of the whole path."""
        return [run for node in self.path() for run in node.latent(layer).index_run()]

    def _attended(self, layer: int) -> KeyValueState | LatentState:
        state = self.layers[layer]
        assert not isinstance(state, RecurrentState), f"layer {layer} is recurrent"
        return state

    def _own_end(self, chunk: Chunk) -> int | None:
        """Up to which of the node's tokens a chunk reads its own node: a constant holds no more than that."""
        return None if self.constant else chunk.own_begin

    def plan(self, layers: Iterable[int], chunk: Chunk, reader: Reader) -> None:
        """Tell where the path's state lives that a chunk is about to run through layers, in which order: a hint."""
        root = self.path()[0]
        root.residency.plan(passage for layer in layers for passage in self._passages(layer, chunk, reader, root))

    def check_staging(self) -> None:
        """After the first chunk: raise `InputError` if the node's state, once complete, could not be fetched."""
        self.residency.check(self._largest_passages())

    def _passages(self, layer: int, chunk: Chunk, reader: Reader, root: NodeState) -> list[Passage]:
        """What a layer will pass over of the root's state."""
        staging, kind = root.residency.staging, self._kinds[layer]
        if isinstance(kind, RecurrentKind):
            return []
        if isinstance(kind, LatentKind) and kind.topk is not None and self.start + chunk.end > kind.topk:
            if kind.indexer != "full" or reader != "forward":
                return []  # rows are gathered
            return [run.passage() for run in self.index_runs_before(layer, chunk) if run.staging is staging]
        keys = self._keys(layer, self.runs_before(layer, chunk), self.start + chunk.begin)
        directions = [reader == "backward"]
        if reader == "replay":  # outputs of latent attention are not kept from forward to replay
            directions = [False, True] if isinstance(kind, LatentKind) else [True]
        return [
            passage
            for backward in directions
            for passage in keys.passages(chunk.num_tokens, backward=backward, staging=staging)
        ]

    def _largest_passages(self) -> Iterator[Passage]:
        staging = self.residency.staging
        for layer, state in enumerate(self.layers):
            if isinstance(state, RecurrentState):
                continue
            run, kind = state.complete_run(constant=self.constant), self._kinds[layer]
            if isinstance(kind, LatentKind) and kind.topk is not None:
                run = run.cut(0, kind.topk)  # queries that see more rows gather those that they select
                yield from (index.passage() for index in self.latent(layer).complete_index_run())
            keys = self._keys(layer, [run], self.end)
            for backward in (False, True):
                yield from keys.passages(self.chunk_tokens, backward=backward, staging=staging)

    def _keys(self, layer: int, runs: Sequence[KeyRun], start: int) -> ChunkKeys:
        """The setting of a chunk as far as passages depend on it."""
        kind = self._kinds[layer]
        window = kind.window if isinstance(kind, KeyValueKind) else None
        return ChunkKeys(runs, start, scale=1.0, keys_per_backward_call=self.chunk_tokens, window=window)

    def open_cotangents(self, *, has_children: bool) -> None:
        """Before replay: buffers for what later chunks of the node and, if it has any, its children will send."""
        for state in self.layers:
            if has_children or (not isinstance(state, RecurrentState) and len(self.chunks) > 1):
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
        self.residency.rest()

    @property
    def num_bytes(self) -> int:
        hidden = [tensor for tensor in (self.last_hidden, self.d_last_hidden) if tensor is not None]
        return sum(state.num_bytes for state in self.layers) + sum(t.numel() * t.element_size() for t in hidden)
