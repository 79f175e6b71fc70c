"""Replay: pull cotangents back through a subtree, children first, one node and one chunk at a time.

Reverse order makes the cotangent of a chunk's state complete exactly when that chunk is replayed: all later chunks of
its node and all child nodes have already added to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longstraw.execution.capture import chunk_targets, score_chunk
from longstraw.execution.chunk import ChunkForward, ChunkGraph, forward_chunk, pull_chunk_by_layer
from longstraw.execution.head import pull_tokens
from longstraw.execution.runner import Runner
from longstraw.execution.score import capture_span
from longstraw.execution.tree import SpanNode
from longstraw.state.node import Chunk, NodeState
from longstraw.state.recurrent import Boundary

# Called with a trajectory's index and last node once all its logprobs are known; adds to `d_logprobs_T` along its path.
SendCotangents = Callable[[int, SpanNode], None]


def replay_subtree(run: Runner, node: SpanNode, parent: NodeState, send: SendCotangents) -> None:
    """Score a span's subtree and pull the loss's cotangents back through it to the parent's state.

    The one forward of a leaf's last chunk serves its score and its replay. All state of the subtree is freed on return.
    """
    if _fits_one_graph(run, node):
        _replay_in_one_graph(run, node, parent, send)
        return
    keeps_last_chunk = not node.children and run.graph_scope == "layer"
    captured = capture_span(run, node, parent, constant=False, keeps_last_chunk=keeps_last_chunk)
    state = captured.node
    state.open_cotangents(has_children=bool(node.children))
    for child in node.children:
        replay_subtree(run, child, state, send)
    for index in node.ending:
        send(index, node)
    if node.has_cotangent() or state.received_cotangent:
        pull_node(run, state, node, captured.last_chunk)
    state.free()
    node.release()


def _fits_one_graph(run: Runner, node: SpanNode) -> bool:
    """A leaf so short that the graph of all its layers is no larger than that of one layer of a full chunk."""
    token_layers = len(node.span) * (1 if run.graph_scope == "chunk" else run.decoder.num_layers)
    return not node.children and token_layers <= run.chunk_tokens


def _replay_in_one_graph(run: Runner, node: SpanNode, parent: NodeState, send: SendCotangents) -> None:
    """Replay a short leaf with a single forward: its graph is kept from score to pull, its state is never stored."""
    state = run.new_node(node.span.token_ids, parent, constant=False)
    chunk = state.chunks[0]
    graph = ChunkGraph(run, state, chunk)
    if node.span.trained:
        scores_2T = torch.zeros(2, len(node.span), device=state.token_ids.device)
        hidden_BTE = graph.forward.hidden_BTE
        score_chunk(run, state, chunk, hidden_BTE, temperature=node.span.temperature, into_2T=scores_2T)
        node.hold(*run.sum_over_context(scores_2T, kind="scores"))
    run.watch.advance(chunk.num_tokens)
    for index in node.ending:
        send(index, node)
    if node.has_cotangent():
        d_hidden = _token_cotangents(run, state, chunk, node, graph.forward)
        _send_to_parent(run, parent, graph.pull(d_hidden, [Boundary()] * run.decoder.num_layers))
        _pull_first_token(run, state, parent, node)
    node.release()


def pull_node(run: Runner, state: NodeState, node: SpanNode | None, last_chunk: ChunkForward | None = None) -> None:
    """Pull everything a node received, and its own tokens' cotangents, back through its chunks in reverse.

    `node` is None for the prompt, whose tokens are not in the loss. What belongs to the parent is added there.
    """
    d_ends = [
        state.recurrent(layer).d_end if run.decoder.recurrent(layer) else Boundary()
        for layer in range(run.decoder.num_layers)
    ]
    trained = node if node is not None and node.span.trained else None
    for chunk in reversed(state.chunks):
        d_ends = _pull_chunk(run, state, chunk, trained, last_chunk, d_ends)
        last_chunk = None
        if node is None:
            run.watch.advance(chunk.num_tokens)
    if state.parent is None:
        return
    _send_to_parent(run, state.parent, d_ends)
    if trained is not None:
        _pull_first_token(run, state, state.parent, trained)


def _pull_chunk(
    run: Runner,
    state: NodeState,
    chunk: Chunk,
    trained: SpanNode | None,
    forward: ChunkForward | None,
    d_ends: list[Boundary],
) -> list[Boundary]:
    graph = ChunkGraph(run, state, chunk) if run.graph_scope == "chunk" else None
    if graph is not None:
        forward = graph.forward
    elif forward is None:
        forward = forward_chunk(run, state, chunk, writes=False, keeps_inputs=True)
    d_hidden = _token_cotangents(run, state, chunk, trained, forward)
    if chunk is state.chunks[-1] and state.d_last_hidden is not None and run.owns_last(state):
        d_hidden[0, -1:] += state.d_last_hidden
    if graph is not None:
        return graph.pull(d_hidden, d_ends)
    return pull_chunk_by_layer(run, state, chunk, forward.layers, d_hidden, d_ends)


def _token_cotangents(
    run: Runner, state: NodeState, chunk: Chunk, trained: SpanNode | None, forward: ChunkForward
) -> Tensor:
    """Cotangent `[1, T, E]` of a chunk's last hidden states from the node's own tokens that they predict."""
    d_hidden = torch.zeros_like(forward.hidden_BTE)
    token_N = chunk_targets(run, state, chunk)
    if trained is not None and len(token_N) > 0:
        predicting = forward.hidden_BTE[0, : len(token_N)]
        targets, cotangents = state.token_ids[token_N], _cotangents(trained, token_N)
        d_hidden[0, : len(token_N)] = pull_tokens(
            run.decoder, predicting, targets, trained.span.temperature, *cotangents
        )
    return d_hidden


def _pull_first_token(run: Runner, state: NodeState, parent: NodeState, trained: SpanNode) -> None:
    """A node's first token is predicted by its parent's last hidden state, on the rank that ran it."""
    if not run.owns_last(parent):
        return
    assert parent.last_hidden is not None, "the parent is alive while its children are replayed"
    first = torch.zeros(1, dtype=torch.int64, device=state.token_ids.device)
    targets, cotangents = state.token_ids[first], _cotangents(trained, first)
    d_hidden = pull_tokens(run.decoder, parent.last_hidden, targets, trained.span.temperature, *cotangents)
    if parent.d_last_hidden is not None:
        parent.d_last_hidden += d_hidden


def _send_to_parent(run: Runner, parent: NodeState, d_starts: list[Boundary]) -> None:
    for ancestor in parent.path():
        ancestor.received_cotangent = not ancestor.constant
    if parent.constant:
        return
    for layer in range(run.decoder.num_layers):
        if run.decoder.recurrent(layer):
            parent.recurrent(layer).d_end.add_(d_starts[layer])


def _cotangents(node: SpanNode, token_N: Tensor) -> tuple[Tensor, Tensor]:
    assert node.d_logprobs_T is not None and node.d_entropies_T is not None, "a trained span was scored"
    return node.d_logprobs_T[token_N], node.d_entropies_T[token_N]
