"""The engine: what users call. It checks what it is given, then hands over to the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from longstraw.errors import InputError, StaleStateError
from longstraw.execution.agreement import Agreement
from longstraw.execution.loss import LossTotals
from longstraw.execution.progress import Progress, Silent, Stopwatch
from longstraw.execution.runner import Runner
from longstraw.execution.sample import sample_responses
from longstraw.execution.score import score_trajectories
from longstraw.execution.state import PromptState, Stamp
from longstraw.execution.transaction import GradientSums
from longstraw.execution.update import capture_prompt, group_advantages, group_loss, num_tree_tokens, replay_group
from longstraw.grpo.losses import GRPO
from longstraw.grpo.objective import GroupFunction, Objective, as_objective
from longstraw.models.decoder import Decoder
from longstraw.parallel.topology import Topology
from longstraw.records import (
    ForwardBackwardReport,
    Prompt,
    Response,
    ResponseGroup,
    SamplingSettings,
    StepReport,
    Trajectory,
    num_trained_tokens,
)
from longstraw.state.residency import ON_DEVICE, InHostMemory, Residency


class Engine:
    """Runs capture, sampling, scoring and exact replay on any supported transformers or peft model.

    `chunk_tokens`: tokens that run at once; live memory grows with it. `prompt_gradient`: "exact" pulls the gradient
    back through the prompt, "stopped" treats its state as a constant (cheaper, biased). `graph_scope`: "layer" keeps
    the graph of one layer of one chunk, "chunk" that of a whole chunk (one forward less, more memory, same
    gradients). `residency`: where the state of prompts lives; with "host" it is fetched through `staging_bytes` of
    device memory, so that a longer prompt takes host memory only (slower, same gradients). `max_state_age`: by how
    many optimizer steps a state may be older than the policy it is used with. `topology`: the ranks that share the work
    (`Topology.create`); those of a context axis make the same calls with the same inputs, those of a data axis have
    groups of their own, and an expert axis keeps a part of the model's routed experts on each rank, in place. Otherwise
    the model stays usable as before; its trained parameters' `.grad` is the engine's. Raises `UnsupportedError` before
    any memory is allocated if the model or a feature of it is not supported.
    """

    def __init__(  # noqa: PLR0913 (the settings of an engine, by keyword only)
        self,
        model: nn.Module,
        *,
        chunk_tokens: int = 4096,
        prompt_gradient: Literal["exact", "stopped"] = "exact",
        graph_scope: Literal["layer", "chunk"] = "layer",
        residency: Literal["device", "host"] = "device",
        staging_bytes: int = 2**30,
        max_state_age: int = 0,
        topology: Topology | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise InputError(f"chunk_tokens must be a positive whole number, got {chunk_tokens!r}.")
        if prompt_gradient not in ("exact", "stopped"):
            raise InputError(f"prompt_gradient must be 'exact' or 'stopped', got {prompt_gradient!r}.")
        if graph_scope not in ("layer", "chunk"):
            raise InputError(f"graph_scope must be 'layer' or 'chunk', got {graph_scope!r}.")
        if residency not in ("device", "host"):
            raise InputError(f"residency must be 'device' or 'host', got {residency!r}.")
        if not isinstance(staging_bytes, int) or staging_bytes < 1:
            raise InputError(f"staging_bytes must be a positive whole number, got {staging_bytes!r}.")
        if max_state_age < 0:
            raise InputError(f"max_state_age must be 0 or more optimizer steps, got {max_state_age}.")
        self.model = model
        self.prompt_gradient = prompt_gradient
        self.max_state_age = max_state_age
        self.policy_version = 0
        self._progress = progress or Silent()
        self._decoder = Decoder(model)
        self._chunk_tokens = chunk_tokens
        self._graph_scope = graph_scope
        self._agreement = Agreement(topology or Topology.single(), self._decoder)
        self._residency: Residency = ON_DEVICE
        if residency == "host":
            self._residency = InHostMemory(self._decoder.device, staging_bytes)
        self._gradients = GradientSums(self._decoder.trained_parameters)
        self._denominator = 0.0
        self._has_gradient = False

    def capture(self, prompt: Prompt) -> PromptState:
        """The prompt's typed state, without autograd. Use it in a `with` block: its bytes are freed on exit."""
        self._check_prompt(prompt)
        with self._decoder.driven():
            return self._capture(self._runner(), prompt)

    def sample(self, state: PromptState, num_responses: int, settings: SamplingSettings) -> list[Response]:
        """G responses in one batch, with the logprobs of the policy that sampled them. No gradient.

        A response ends with the first of `settings.stop_ids` (included) or is `truncated` at `max_new_tokens`.
        Logprobs are those of softmax(logits / temperature), before top-k, top-p and min-p, as `score` gives them.
        """
        self._check_state(state)
        if num_responses < 1:
            raise InputError(f"num_responses must be at least 1, got {num_responses}.")
        self._check_positions(len(state.prompt), settings.max_new_tokens, "max_new_tokens")
        self._check_vocabulary(torch.tensor(settings.stop_ids, dtype=torch.int64), "sampling: stop_ids")
        run = self._runner()
        total = num_responses * settings.max_new_tokens
        with self._decoder.driven(), run.watch.stage("sample", total):
            return sample_responses(run, state.node, num_responses, settings)

    def score(self, state: PromptState, responses: Sequence[Trajectory | Response]) -> list[Tensor]:
        """Logprobs of the trained tokens under the current policy, float32 `[R]` per response. No gradient."""
        self._check_state(state)
        group = ResponseGroup(state.prompt, responses)
        self._check_group(group, 0)
        run = self._runner()
        with self._decoder.driven(), run.watch.stage("score", num_tree_tokens(group)):
            return [scores.logprobs_R for scores in score_trajectories(run, state.node, responses)]

    def forward_backward(
        self,
        groups: Sequence[ResponseGroup],
        objective: Objective | Callable[..., Tensor],
        states: Sequence[PromptState] | None = None,
    ) -> ForwardBackwardReport:
        """Add the groups' gradients to `.grad` as sums; nothing is divided before `optimizer_step`.

        `objective` is `GRPO(...)` or a function of a group's token logprobs (see `longstraw.grpo.objective`).
        `states` are the groups' captured prompts; without them each prompt is captured here and freed. Groups that
        cannot give a gradient (equal rewards without KL term, every response truncated and masked) are skipped and
        counted. With `scale_rewards="batch"` the groups of all ranks of a data axis are the batch, and all call this
        alike, those without groups too. If it raises while it runs, all sums since the last step are dropped: a part of
        a group is no gradient.
        """
        checked = as_objective(objective)
        if not isinstance(checked, GroupFunction) and checked.needs_reference:
            self._decoder.check_reference()
        if not groups and not self._agreement.may_be_idle:
            raise InputError("forward_backward: groups is empty.")
        for index, group in enumerate(groups):
            self._check_group(group, index)
        self._check_states(groups, states)
        others = self._agreement.groups_of_others(groups) if _needs_the_whole_batch(checked) else []
        advantages = group_advantages([*groups, *others], checked)[: len(groups)]
        for group, advantages_G in zip(groups, advantages, strict=True):
            self._agreement.check_inputs("group", group.prompt, *group.responses, advantages_G)
        num_bytes_before = self._agreement.bytes_sent()
        run, totals = self._runner(), LossTotals()
        reasons: list[str] = []
        try:
            with self._decoder.driven(), self._gradients.collecting():
                for index, group in enumerate(groups):
                    reason = _nothing_to_learn(group, checked, advantages[index], index)
                    if reason:
                        reasons.append(reason)
                        continue
                    self._replay(run, group, checked, advantages[index], states[index] if states else None, totals)
        except BaseException:
            self._drop_sums()
            raise
        denominator = sum(_denominator(group, checked) for group in groups)
        self._denominator += denominator
        return ForwardBackwardReport(
            loss_sum=totals.loss_sum,
            denominator=denominator if not isinstance(checked, GroupFunction) else 1.0,
            num_groups=len(groups),
            num_skipped_groups=len(reasons),
            num_trajectories=sum(len(group.responses) for group in groups),
            num_prompt_tokens=sum(len(group.prompt) for group in groups),
            num_trained_tokens=sum(num_trained_tokens(r) for group in groups for r in group.responses),
            metrics=totals.metric_sums.means(),
            stage_seconds=run.watch.seconds,
            skipped_reasons=tuple(reasons),
            bytes_sent=self._agreement.bytes_sent(since=num_bytes_before),
        )

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> StepReport:
        """The transaction: divide the sums once, clip by the global norm, step, raise the policy version.

        Leaves the final gradient in `.grad`; the next `forward_backward` starts from zero. When every group since the
        last step was skipped, on all ranks, it does not step. Raises `LongStrawError`, without stepping, when the
        gradient is not finite. With a topology gradients and denominators are summed over ranks first, so all ranks
        step alike or none does, and must all call it; then copies of parameters are compared, and an error on all
        ranks names the first that differs.
        """
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InputError(f"max_grad_norm must be positive or None, got {max_grad_norm}.")
        denominator, has_gradient = self._agreement.sum_over_data(self._denominator, self._has_gradient)
        self._denominator, self._has_gradient = 0.0, False
        if not has_gradient:
            self._gradients.finish()
            reason = "no group since the last step gave a gradient"
            return StepReport(False, denominator, 0.0, self.policy_version, reason)
        divisor = denominator or 1.0
        self._gradients.sum_over(self._agreement.sum_gradients)
        self._gradients.divide(divisor)
        try:
            norm = self._agreement.norm(self._gradients.totals())
            if max_grad_norm is not None and norm > max_grad_norm:
                self._gradients.scale(max_grad_norm / (norm + 1e-6))
        finally:
            self._gradients.finish()
        optimizer.step()
        self.policy_version += 1
        self._agreement.compare_copies()
        return StepReport(True, divisor, norm, self.policy_version)

    def _replay(
        self,
        run: Runner,
        group: ResponseGroup,
        objective: Objective | GroupFunction,
        advantages_G: Tensor,
        given: PromptState | None,
        totals: LossTotals,
    ) -> None:
        state = given or self._capture(run, group.prompt)
        try:
            loss = group_loss(run, group, objective, advantages_G, state.node, totals)
            replay_group(run, group, state.node, loss, state.take_last_chunk())
            self._has_gradient = True
        finally:
            if given is None:
                state.free()

    def _capture(self, run: Runner, prompt: Prompt) -> PromptState:
        self._agreement.check_inputs("prompt", prompt)
        captured = capture_prompt(run, prompt, constant=self.prompt_gradient == "stopped")
        return PromptState(prompt, captured, self._decoder, Stamp(self.policy_version, self._parameter_writes()))

    def _drop_sums(self) -> None:
        self._gradients.clear()
        self._denominator, self._has_gradient = 0.0, False

    def _runner(self) -> Runner:
        watch = Stopwatch(self._progress)
        context, order = self._agreement.context, self._agreement.token_order
        return Runner(self._decoder, self._chunk_tokens, self._graph_scope, self._residency, watch, context, order)

    def _parameter_writes(self) -> int:
        """Changes whenever a trained parameter is written in place, by this engine's step or by anyone."""
        return sum(p._version for p in self._decoder.trained_parameters.values())

    def _check_prompt(self, prompt: Prompt) -> None:
        if not isinstance(prompt, Prompt):
            raise InputError(f"prompt must be a longstraw.Prompt, got {type(prompt).__name__}.")
        self._check_positions(len(prompt), 0, "prompt")
        self._check_vocabulary(prompt.token_ids, "prompt")

    def _check_positions(self, num_prompt_tokens: int, num_more: int, what: str) -> None:
        limit = self._decoder.max_positions
        if num_prompt_tokens > limit:
            raise InputError(f"the prompt has {num_prompt_tokens} tokens, the model's positions end at {limit}.")
        if num_prompt_tokens + num_more > limit:
            raise InputError(
                f"{what}: {num_more} tokens after a prompt of {num_prompt_tokens} pass the model's last position, "
                f"{limit}."
            )

    def _check_vocabulary(self, token_ids: Tensor, what: str) -> None:
        size = self._decoder.vocabulary_size
        if token_ids.numel() and int(token_ids.max()) >= size:
            raise InputError(f"{what}: token id {int(token_ids.max())} is outside the model's vocabulary of {size}.")

    def _check_group(self, group: ResponseGroup, index: int) -> None:
        self._check_prompt(group.prompt)
        for number, response in enumerate(group.responses):
            name = f"group {index}, response {number}"
            num_tokens = sum(len(span) for span in response.spans)
            self._check_positions(len(group.prompt), num_tokens, name)
            for span in response.spans:
                self._check_vocabulary(span.token_ids, name)
            if num_trained_tokens(response) == 0:
                raise InputError(f"{name}: it has no trained token; at least one span must have trained=True.")

    def _check_states(self, groups: Sequence[ResponseGroup], states: Sequence[PromptState] | None) -> None:
        if states is None:
            return
        if len(states) != len(groups):
            raise InputError(f"forward_backward: {len(states)} states for {len(groups)} groups; give one for each.")
        for index, (group, state) in enumerate(zip(groups, states, strict=True)):
            self._check_state(state)
            if not torch.equal(state.prompt.token_ids, group.prompt.token_ids):
                raise InputError(f"forward_backward: state {index} was captured from another prompt than its group's.")

    def _check_state(self, state: PromptState) -> None:
        if not isinstance(state, PromptState):
            raise InputError(f"state must come from Engine.capture, got {type(state).__name__}.")
        if state.owner is not self._decoder:
            raise InputError("state was captured by another engine; capture the prompt with this one.")
        age = self.policy_version - state.stamp.policy_version
        if age > self.max_state_age:
            raise StaleStateError(
                f"the state was captured by policy version {state.stamp.policy_version}, the policy is now "
                f"{self.policy_version}; capture again, or set max_state_age={age} to accept it."
            )
        if age == 0 and state.stamp.parameter_writes != self._parameter_writes():
            raise StaleStateError("trained parameters were changed since the state was captured; capture again.")
        assert state.node is not None, "raises when freed"


def _needs_the_whole_batch(objective: Objective | GroupFunction) -> bool:
    """Whether rewards that other ranks of a data axis have change the advantages here."""
    return isinstance(objective, GRPO) and objective.scale_rewards == "batch"


def _nothing_to_learn(
    group: ResponseGroup, objective: Objective | GroupFunction, advantages_G: Tensor, index: int
) -> str:
    """Why a group gives no gradient, or an empty string."""
    if isinstance(objective, GroupFunction):
        return ""
    if all(objective.is_masked(response.truncated) for response in group.responses):
        return f"group {index}: every response was truncated and mask_truncated_completions is on"
    if not objective.needs_reference and not bool(advantages_G.any()):
        return f"group {index}: all rewards are equal, so every advantage is zero"
    return ""


def _denominator(group: ResponseGroup, objective: Objective | GroupFunction) -> float:
    if isinstance(objective, GroupFunction):
        return 0.0
    return sum(objective.denominator(num_trained_tokens(r), r.truncated) for r in group.responses)
