"""One update on one screen: capture, score, advantages, replay. The fifth stage is in `transaction.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longstraw.execution.capture import Captured, capture_node
from longstraw.execution.chunk import ChunkForward
from longstraw.execution.loss import GroupFunctionLoss, LossTotals, ObjectiveLoss
from longstraw.execution.replay import pull_node, replay_subtree
from longstraw.execution.runner import Runner
from longstraw.execution.score import Scores, score_trajectories
from longstraw.execution.tree import build_tree, walk
from longstraw.grpo.objective import GroupFunction, Objective
from longstraw.records import Prompt, ResponseGroup
from longstraw.state.node import NodeState


def capture_prompt(run: Runner, prompt: Prompt, *, constant: bool) -> Captured:
    """Stage 1: the prompt's state, chunk by chunk, layer by layer, without autograd.

    The forward of a last chunk that is at most half full is kept for its replay: with a response's chunk beside it, the
    layer inputs alive are still about those of one chunk, and one of the three forwards of a short prompt is saved.
    """
    last_tokens = len(prompt) % run.chunk_tokens or run.chunk_tokens
    keeps = not constant and run.graph_scope == "layer" and 2 * last_tokens <= run.chunk_tokens
    with run.watch.stage("capture", len(prompt)):
        return capture_node(run, prompt.token_ids, None, constant=constant, keeps_last_chunk=keeps)


def score_reference(run: Runner, group: ResponseGroup) -> list[Scores]:
    """Stage 2, reference policy: adapters off, on a capture of its own."""
    with run.decoder.adapters_off(), run.watch.stage("reference", len(group.prompt) + num_tree_tokens(group)):
        state = capture_node(run, group.prompt.token_ids, None, constant=True).node
        return score_trajectories(run, state, group.responses)


def group_loss(
    run: Runner,
    group: ResponseGroup,
    objective: Objective | GroupFunction,
    advantages_G: Tensor,
    prompt_state: NodeState,
    totals: LossTotals,
) -> ObjectiveLoss | GroupFunctionLoss:
    """Stages 2 and 3: what turns a trajectory's logprobs into their cotangents."""
    if isinstance(objective, GroupFunction):
        with run.watch.stage("score", num_tree_tokens(group)):
            scores = score_trajectories(run, prompt_state, group.responses)
        return GroupFunctionLoss.evaluate(objective, group, scores, totals)
    references = score_reference(run, group) if objective.needs_reference else None
    return ObjectiveLoss(objective, group, advantages_G, references, totals)


def replay_group(
    run: Runner,
    group: ResponseGroup,
    prompt_state: NodeState,
    loss: ObjectiveLoss | GroupFunctionLoss,
    last_chunk: ChunkForward | None,
) -> None:
    """Stage 4: responses one at a time, each freed before the next; then the prompt, if its gradient is exact."""
    if not prompt_state.constant:
        prompt_state.open_cotangents(has_children=True)
    try:
        with run.watch.stage("replay", num_tree_tokens(group)):
            for node in build_tree(group.responses):
                replay_subtree(run, node, prompt_state, loss.send)
        if prompt_state.received_cotangent:
            with run.watch.stage("prompt_replay", len(group.prompt)):
                pull_node(run, prompt_state, None, last_chunk)
    finally:
        prompt_state.close_cotangents()


def num_tree_tokens(group: ResponseGroup) -> int:
    """Tokens after the prompt, shared spans counted once."""
    return sum(len(node.span) for node in walk(build_tree(group.responses)))


def group_advantages(groups: Sequence[ResponseGroup], objective: Objective | GroupFunction) -> list[Tensor]:
    """Stage 3: advantages `[G]` of every group; none for a user's function, which has its own."""
    if isinstance(objective, GroupFunction):
        return [Tensor() for _ in groups]
    return objective.group_advantages(groups)
