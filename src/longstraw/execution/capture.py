"""Run a node without autograd and keep its state; score its tokens on the way where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.chunk import ChunkForward, forward_chunk
from longstraw.execution.head import score_tokens
from longstraw.execution.runner import Runner
from longstraw.state.node import Chunk, NodeState


@dataclass(frozen=True, eq=False)
class Captured:
    """A node's state and, where asked, its tokens' logprobs and entropies and its last chunk, ready to be pulled."""

    node: NodeState
    logprobs_T: Tensor  # float32 [T]; empty when not scored
    entropies_T: Tensor
    last_chunk: ChunkForward | None


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
    scores_2T = torch.zeros(2, len(token_ids) if temperature is not None else 0, device=node.token_ids.device)
    forward = None
    for chunk in node.chunks:
        keeps_inputs = keeps_last_chunk and chunk is node.chunks[-1]
        forward = forward_chunk(run, node, chunk, writes=True, keeps_inputs=keeps_inputs)
        if chunk is node.chunks[0]:
            node.check_staging()
        if temperature is not None:
            score_chunk(run, node, chunk, forward.hidden_BTE, temperature=temperature, into_2T=scores_2T)
        run.watch.advance(chunk.num_tokens)
    assert forward is not None, "a node has a token"
    node.last_hidden = _last_hidden(run, node, forward.hidden_BTE)
    logprobs_T, entropies_T = run.sum_over_context(scores_2T, kind="scores")
    return Captured(node, logprobs_T, entropies_T, forward if keeps_last_chunk else None)


def score_chunk(
    run: Runner, node: NodeState, chunk: Chunk, hidden_BTE: Tensor, *, temperature: float, into_2T: Tensor
) -> None:
    """Put the logprobs and entropies that this rank's hidden states of a chunk give to the node's tokens.

    Before the first chunk the parent's last hidden state predicts too, on the rank that ran it.
    """
    token_N = chunk_targets(run, node, chunk)
    hidden_NE = hidden_BTE[0, : len(token_N)]
    parent = node.parent
    if chunk is node.chunks[0] and parent is not None and run.owns_last(parent):
        assert parent.last_hidden is not None, "captured before its children"
        token_N = torch.cat([token_N.new_zeros(1), token_N])
        hidden_NE = torch.cat([parent.last_hidden, hidden_NE])
    if len(token_N) > 0:
        scores = score_tokens(run.decoder, hidden_NE, node.token_ids[token_N], temperature)
        into_2T[:, token_N] = torch.stack(scores)


def chunk_targets(run: Runner, node: NodeState, chunk: Chunk) -> Tensor:
    """Which of the node's tokens this rank's hidden states of a chunk predict; the node's last one predicts none."""
    token_N = run.own_tokens(node, chunk) + 1
    return token_N[:-1] if chunk is node.chunks[-1] and run.owns_last(node) else token_N


def _last_hidden(run: Runner, node: NodeState, hidden_BTE: Tensor) -> Tensor:
    """`[1, E]` on every rank, from the one that ran the node's last token."""
    owner = run.last_owner(node)
    last = hidden_BTE[0, -1:].clone() if owner == run.context.rank else hidden_BTE.new_empty(1, hidden_BTE.shape[-1])
    return run.context.start_broadcast(last, owner, kind="last_hidden").wait()
