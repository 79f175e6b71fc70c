"""Run a node without autograd and keep its state; score its tokens on the way where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.chunk import ChunkForward, forward_chunk
from longstraw.execution.head import score_tokens
from longstraw.execution.progress import Stopwatch
from longstraw.models.decoder import Decoder
from longstraw.state.node import Chunk, NodeState
from longstraw.state.residency import ON_DEVICE, Residency


@dataclass(frozen=True, eq=False)
class Captured:
    """A node's state and, where asked, its tokens' logprobs and entropies and its last chunk, ready to be pulled."""

    node: NodeState
    logprobs_T: Tensor  # float32 [T]; empty when not scored
    entropies_T: Tensor
    last_chunk: ChunkForward | None


@dataclass(frozen=True)
class Runner:
    """What every stage runs with: decoder, chunk size, where prompts' state lives, and who is told of progress."""

    decoder: Decoder
    chunk_tokens: int
    graph_scope: str
    residency: Residency
    watch: Stopwatch

    def new_node(self, token_ids: Tensor, parent: NodeState | None, *, constant: bool) -> NodeState:
        decoder = self.decoder
        return NodeState(
            token_ids.to(decoder.device),
            parent,
            chunk_tokens=self.chunk_tokens,
            kinds=decoder.kinds,
            constant=constant,
            residency=self.residency if parent is None else ON_DEVICE,
        )


def capture_node(
    run: Runner,
    token_ids: Tensor,
    parent: NodeState | None,
    *,
    constant: bool,
    temperature: float | None = None,
    keeps_last_chunk: bool = False,
) -> Captured:
    """Forward every chunk of a node. With a `temperature` its tokens are scored too, which needs a parent."""
    node = run.new_node(token_ids, parent, constant=constant)
    logprobs, entropies = [], []
    last_hidden = None if parent is None else parent.last_hidden
    forward = None
    for chunk in node.chunks:
        keeps_inputs = keeps_last_chunk and chunk is node.chunks[-1]
        forward = forward_chunk(run.decoder, node, chunk, writes=True, keeps_inputs=keeps_inputs)
        if chunk is node.chunks[0]:
            node.check_staging()
        if temperature is not None:
            assert last_hidden is not None, "the first token of a scored node is predicted by its parent"
            predicting = predicting_hidden(last_hidden, forward.hidden_BTE)
            targets = node.token_ids[chunk.begin : chunk.end]
            scores = score_tokens(run.decoder, predicting, targets, temperature)
            logprobs.append(scores[0])
            entropies.append(scores[1])
        last_hidden = forward.hidden_BTE[0, -1:].clone()
        run.watch.advance(chunk.num_tokens)
    node.last_hidden = last_hidden
    empty = torch.empty(0, device=node.token_ids.device)
    return Captured(
        node,
        torch.cat(logprobs) if logprobs else empty,
        torch.cat(entropies) if entropies else empty,
        forward if keeps_last_chunk else None,
    )


def predicting_hidden(before_1E: Tensor, hidden_BTE: Tensor) -> Tensor:
    """`[T, E]`: the hidden states that predict a chunk's tokens: the one before it and all of its own but the last."""
    return torch.cat([before_1E, hidden_BTE[0, :-1]])


def chunk_targets(node: NodeState, chunk: Chunk) -> Tensor:
    """The tokens of the node that a chunk's own hidden states predict: one fewer than its tokens in the last chunk."""
    return node.token_ids[chunk.begin + 1 : chunk.end + 1]
