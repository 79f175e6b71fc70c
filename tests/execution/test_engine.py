"""What the engine refuses, and what it leaves behind: versions, skipped groups, gradients as sums, freed bytes."""

import pytest
import torch

from longstraw.errors import InputError, LongStrawError, StaleStateError, UnsupportedError
from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings, Span, Trajectory
from tiny import full_gradients, full_logprobs, gradients, random_ids, tiny_model, worst_error

PROMPT = Prompt(random_ids(21, 1))
RESPONSES = [Response(random_ids(n, n)) for n in (3, 12)]


@pytest.fixture
def engine():
    return Engine(tiny_model("llama"), chunk_tokens=8)


def optimizer_of(engine, lr=1e-3):
    return torch.optim.SGD([p for p in engine.model.parameters() if p.requires_grad], lr=lr)


def test_prompt_beyond_the_models_positions_is_refused(engine):
    with pytest.raises(InputError, match="600 tokens, the model's positions end at 512"):
        engine.capture(Prompt(random_ids(600, 1)))


def test_sampling_beyond_the_models_positions_is_refused(engine):
    with engine.capture(PROMPT) as state, pytest.raises(InputError, match="max_new_tokens: 500 tokens after"):
        engine.sample(state, 1, SamplingSettings(max_new_tokens=500))


def test_tokens_outside_the_vocabulary_are_refused(engine):
    with pytest.raises(InputError, match="token id 99 is outside"):
        engine.capture(Prompt([1, 99]))
    with pytest.raises(InputError, match="group 0, response 1: token id 120"):
        engine.forward_backward([ResponseGroup(PROMPT, [Response([1]), Response([120])], rewards=[0, 1])], GRPO())


def test_a_trajectory_without_trained_tokens_is_refused(engine):
    group = ResponseGroup(PROMPT, [Trajectory([Span([4, 5], False)])], advantages=[1.0])
    with pytest.raises(InputError, match="no trained token"):
        engine.forward_backward([group], GRPO())


def test_a_state_is_refused_after_a_step(engine):
    state = engine.capture(PROMPT)
    engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])], GRPO(), states=[state])
    engine.optimizer_step(optimizer_of(engine))
    with pytest.raises(StaleStateError, match="captured by policy version 0, the policy is now 1"):
        engine.score(state, RESPONSES)


def test_a_state_is_refused_when_parameters_were_changed_behind_the_engines_back(engine):
    state = engine.capture(PROMPT)
    with torch.no_grad():
        next(p for p in engine.model.parameters() if p.requires_grad).add_(1)
    with pytest.raises(StaleStateError, match="changed since"):
        engine.score(state, RESPONSES)


def test_an_age_limit_accepts_an_older_state():
    engine = Engine(tiny_model("llama"), chunk_tokens=8, max_state_age=1)
    state = engine.capture(PROMPT)
    engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])], GRPO(), states=[state])
    engine.optimizer_step(optimizer_of(engine))
    assert len(engine.score(state, RESPONSES)) == 2


def test_a_freed_state_is_refused_and_holds_nothing(engine):
    with engine.capture(PROMPT) as state:
        assert state.num_bytes > 0
    assert state.num_bytes == 0
    with pytest.raises(StaleStateError, match="freed"):
        engine.score(state, RESPONSES)


def test_a_state_of_another_engine_is_refused(engine):
    with Engine(engine.model).capture(PROMPT) as state, pytest.raises(InputError, match="another engine"):
        engine.score(state, RESPONSES)


def test_sums_are_dropped_when_a_group_fails_halfway(engine):
    calls = []

    def fails_at_second_group(logprobs):
        calls.append(1)
        return logprobs[0].sum() * (1.0 if len(calls) == 1 else float("nan"))

    with pytest.raises(InputError):
        engine.forward_backward([ResponseGroup(PROMPT, RESPONSES)] * 2, fails_at_second_group)
    assert not gradients(engine.model)
    assert not engine.optimizer_step(optimizer_of(engine)).stepped


def test_a_state_of_another_prompt_is_refused(engine):
    with engine.capture(Prompt(random_ids(21, 2))) as state, pytest.raises(InputError, match="another prompt"):
        engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])], GRPO(), states=[state])


def test_equal_rewards_are_skipped_counted_and_do_not_step(engine):
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    report = engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0.1, 0.1])], GRPO())
    assert report.num_skipped_groups == 1 and report.denominator == 15
    assert "all rewards are equal" in report.skipped_reasons[0]
    step = engine.optimizer_step(optimizer_of(engine))
    assert not step.stepped and engine.policy_version == 0
    assert all(torch.equal(before[n], p) for n, p in engine.model.named_parameters())


def test_all_truncated_and_masked_is_skipped_with_a_reason(engine):
    responses = [Response([4, 5], truncated=True), Response([6], truncated=True)]
    group = ResponseGroup(PROMPT, responses, rewards=[0, 1])
    report = engine.forward_backward([group], GRPO(mask_truncated_completions=True))
    assert report.num_skipped_groups == 1 and "every response was truncated" in report.skipped_reasons[0]
    assert not engine.optimizer_step(optimizer_of(engine)).stepped


def test_gradients_are_sums_until_the_step_and_start_from_zero_after_it(engine):
    group = ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])
    engine.forward_backward([group], GRPO())
    once = gradients(engine.model)
    engine.forward_backward([group], GRPO())
    assert worst_error(gradients(engine.model), {n: 2 * g for n, g in once.items()})[0] < 1e-5
    engine.optimizer_step(optimizer_of(engine, lr=0.0))
    assert worst_error(gradients(engine.model), {n: g / 15 for n, g in once.items()})[0] < 1e-5
    engine.forward_backward([group], GRPO())
    assert worst_error(gradients(engine.model), once)[0] < 1e-5


def test_accumulating_groups_equals_one_call_with_both(engine):
    groups = [ResponseGroup(Prompt(random_ids(n, n)), RESPONSES, rewards=[0, n]) for n in (5, 17)]
    engine.forward_backward(groups, GRPO(loss_type="grpo"))
    engine.optimizer_step(optimizer_of(engine, lr=0.0))
    together = gradients(engine.model)
    for group in groups:
        engine.forward_backward([group], GRPO(loss_type="grpo"))
    engine.optimizer_step(optimizer_of(engine, lr=0.0))
    assert worst_error(gradients(engine.model), together)[0] < 1e-5


def test_bfloat16_parameters_sum_in_float32():
    """Three hundred equal contributions: a bfloat16 sum would stop growing."""
    model = tiny_model("llama", dtype=torch.bfloat16, adapter=False, num_hidden_layers=1)
    engine = Engine(model, chunk_tokens=64)
    group = ResponseGroup(Prompt(random_ids(5, 1)), [Response(random_ids(3, 2))], advantages=[1.0])
    engine.forward_backward([group], GRPO())
    once = {n: g.float() for n, g in gradients(model).items()}
    for _ in range(299):
        engine.forward_backward([group], GRPO())
    assert worst_error(gradients(model), {n: 300 * g for n, g in once.items()})[0] < 2e-2


def test_a_gradient_that_is_not_finite_is_named_and_not_stepped(engine):
    engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])], GRPO())
    name, parameter = next((n, p) for n, p in engine.model.named_parameters() if p.requires_grad)
    parameter.grad.fill_(float("nan"))
    with pytest.raises(LongStrawError, match=name):
        engine.optimizer_step(optimizer_of(engine))
    assert engine.policy_version == 0


def test_reference_is_the_model_with_its_adapter_off():
    model = tiny_model("llama")
    engine = Engine(model, chunk_tokens=8)
    base = model.get_base_model()
    with torch.no_grad(), model.disable_adapter():
        reference = [full_logprobs(base, PROMPT.token_ids, r.token_ids) for r in RESPONSES]

    def conventional(logprobs):
        total = 0
        for part, ref, advantage in zip(logprobs, reference, (0.8, -0.6), strict=True):
            ratio = (part - part.detach()).exp()
            kl = (ref - part).exp() - (ref - part) - 1
            total = total - (ratio * advantage).sum() + 0.3 * kl.sum()
        return total / 15

    want = full_gradients(model, PROMPT.token_ids, [r.token_ids for r in RESPONSES], conventional)
    group = ResponseGroup(PROMPT, RESPONSES, advantages=[0.8, -0.6])
    report = engine.forward_backward([group], GRPO(beta=0.3, use_bias_correction_kl=False))
    engine.optimizer_step(optimizer_of(engine, lr=0.0))
    assert report.metrics.kl > 0
    assert worst_error(gradients(model), want)[0] < 5e-5


def test_beta_without_an_adapter_is_refused():
    engine = Engine(tiny_model("llama", adapter=False), chunk_tokens=8)
    with pytest.raises(UnsupportedError, match="set beta=0 or train a LoRA adapter"):
        engine.forward_backward([ResponseGroup(PROMPT, RESPONSES, rewards=[0, 1])], GRPO(beta=0.1))


def test_the_model_is_as_before_after_every_call(engine):
    model = engine.model.train()
    with engine.capture(PROMPT) as state:
        engine.score(state, RESPONSES)
    assert model.config._attn_implementation == "eager" and all(module.training for module in model.modules())


def test_a_users_function_gets_the_group_when_it_asks(engine):
    seen = []

    def loss(logprobs, group):
        seen.append(group)
        return sum(part.sum() for part in logprobs)

    group = ResponseGroup(PROMPT, RESPONSES)
    engine.forward_backward([group], loss)
    assert seen == [group]


def test_a_users_function_that_is_not_finite_is_refused(engine):
    with pytest.raises(InputError, match="must be finite"):
        engine.forward_backward([ResponseGroup(PROMPT, RESPONSES)], lambda logprobs: logprobs[0].sum() * float("inf"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("chunk_tokens", 0), ("prompt_gradient", "exactly"), ("graph_scope", "model"), ("max_state_age", -1)],
)
def test_wrong_settings_are_named(setting, value):
    with pytest.raises(InputError, match=setting):
        Engine(tiny_model("llama"), **{setting: value})
