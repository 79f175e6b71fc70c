"""Logprobs of given trajectories on a captured prompt, values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.capture import Captured, capture_node
from longstraw.execution.runner import Runner
from longstraw.execution.tree import SpanNode, build_tree
from longstraw.records import Response, Trajectory
from longstraw.state.node import NodeState


@dataclass(frozen=True, eq=False)
class Scores:
    """Of the trained tokens of one trajectory, float32 `[R]`."""

    logprobs_R: Tensor
    entropies_R: Tensor


def score_trajectories(
    run: Runner, prompt_state: NodeState, trajectories: Sequence[Trajectory | Response]
) -> list[Scores]:
    """Scores in the trajectories' order; spans they share are run once. State of a span dies with its subtree."""
    scores: dict[int, Scores] = {}
    for node in build_tree(trajectories):
        _score_subtree(run, node, prompt_state, scores)
    return [scores[index] for index in range(len(trajectories))]


def _score_subtree(run: Runner, node: SpanNode, parent: NodeState, scores: dict[int, Scores]) -> None:
    captured = capture_span(run, node, parent, constant=True)
    for child in node.children:
        _score_subtree(run, child, captured.node, scores)
    for index in node.ending:
        scores[index] = path_scores(node)


def capture_span(
    run: Runner, node: SpanNode, parent: NodeState, *, constant: bool, keeps_last_chunk: bool = False
) -> Captured:
    """Capture a span's state; the logprobs of a trained span are held by its tree node."""
    captured = capture_node(
        run,
        node.span.token_ids,
        parent,
        constant=constant,
        temperature=node.span.temperature if node.span.trained else None,
        keeps_last_chunk=keeps_last_chunk,
    )
    node.hold(captured.logprobs_T, captured.entropies_T)
    return captured


def path_scores(node: SpanNode) -> Scores:
    """The trained tokens of the trajectory that ends at a node."""
    trained = [(n.logprobs_T, n.entropies_T) for n in node.trained_path()]
    logprobs = [logprobs for logprobs, _ in trained if logprobs is not None]
    entropies = [entropies for _, entropies in trained if entropies is not None]
    if not logprobs:
        return Scores(torch.empty(0), torch.empty(0))
    return Scores(torch.cat(logprobs), torch.cat(entropies))
