"""The update's gradient: at every length, in any order, on trees, over two steps."""

import random

import pytest
import torch

from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.records import Prompt, Response, ResponseGroup, Span, Trajectory
from tiny import full_gradients, full_logprobs, gradients, random_ids, tiny_model, worst_error

TOLERANCE = {"llama": 5e-5, "mistral": 5e-5, "qwen3_5_text": 5e-4, "glm_moe_dsa": 5e-5}
C = 8


def mean_nll(logprobs):
    return -sum(part.mean() for part in logprobs)


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("num_prompt_tokens", [1, 7, C - 1, C, C + 1, 3 * C + 5])
def test_gradient_is_exact_at_every_prompt_and_response_length(name, num_prompt_tokens):
    prompt = random_ids(num_prompt_tokens, 1)
    responses = [random_ids(length, length) for length in (1, 2, C + 1, 5 * C + 3)]
    want = full_gradients(tiny_model(name), prompt, responses, mean_nll)
    model = tiny_model(name)
    group = ResponseGroup(Prompt(prompt), [Response(ids) for ids in responses])
    Engine(model, chunk_tokens=C).forward_backward([group], mean_nll)
    error, tensor = worst_error(gradients(model), want)
    assert error <= TOLERANCE[name], f"{tensor}: relative error {error:.1e}"


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
def test_gradient_is_exact_with_chunks_of_one_to_three_tokens(name, chunk_tokens):
    prompt, responses = random_ids(11, 1), [random_ids(5, 2), random_ids(4, 3)]
    want = full_gradients(tiny_model(name), prompt, responses, mean_nll)
    model = tiny_model(name)
    group = ResponseGroup(Prompt(prompt), [Response(ids) for ids in responses])
    Engine(model, chunk_tokens=chunk_tokens).forward_backward([group], mean_nll)
    assert worst_error(gradients(model), want)[0] <= TOLERANCE[name]


def test_group_gradient_does_not_depend_on_replay_order():
    prompt, responses = random_ids(19, 1), [random_ids(n, n) for n in (3, 12, 1, 7, 20)]
    weights = {len(ids): float(index) - 1.7 for index, ids in enumerate(responses)}

    def loss(logprobs):
        return sum(weights[len(part)] * part.sum() for part in logprobs)

    got = []
    for seed in (0, 1, 2):
        order = random.Random(seed).sample(responses, len(responses))
        model = tiny_model("qwen3_5_text")
        group = ResponseGroup(Prompt(prompt), [Response(ids) for ids in order])
        Engine(model, chunk_tokens=C).forward_backward([group], loss)
        got.append(gradients(model))
    assert worst_error(got[1], got[0])[0] <= 5e-5
    assert worst_error(got[2], got[0])[0] <= 5e-5


def three_levels():
    """Trajectories that share first actions and observations; one ends where others go on."""
    action, tool, other_tool = Span(random_ids(9, 11)), Span(random_ids(5, 12), False), Span(random_ids(3, 13), False)
    return [
        Trajectory([action, tool, Span(random_ids(11, 14))]),
        Trajectory([action, tool, Span(random_ids(2, 15), temperature=0.7)]),
        Trajectory([action, other_tool, Span(random_ids(1, 16))]),
        Trajectory([action]),
        Trajectory([Span(random_ids(4, 17), False), Span(random_ids(6, 18))]),
    ]


def trajectory_logprobs(model, prompt, trajectory):
    """The oracle runs each trajectory whole and takes the trained spans."""
    ids = torch.cat([span.token_ids for span in trajectory.spans])
    parts, at = [], 0
    for span in trajectory.spans:
        if span.trained:
            parts.append(full_logprobs(model, prompt, ids, span.temperature)[at : at + len(span)])
        at += len(span)
    return torch.cat(parts)


@pytest.mark.parametrize("name", TOLERANCE)
def test_tree_gradient_equals_that_of_separate_trajectories(name):
    prompt, trajectories = random_ids(21, 1), three_levels()
    weights = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(len(trajectories))]

    def loss(logprobs):
        return sum((part * w[: len(part)]).sum() for part, w in zip(logprobs, weights, strict=True))

    oracle = tiny_model(name)
    want_scores = [trajectory_logprobs(oracle, prompt, trajectory) for trajectory in trajectories]
    loss(want_scores).backward()
    model = tiny_model(name)
    engine = Engine(model, chunk_tokens=C)
    with engine.capture(Prompt(prompt)) as state:
        scores = engine.score(state, trajectories)
        engine.forward_backward([ResponseGroup(Prompt(prompt), trajectories)], loss, states=[state])
    for got, want in zip(scores, want_scores, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=2e-4)
    error, tensor = worst_error(gradients(model), gradients(oracle))
    assert error <= TOLERANCE[name], f"{tensor}: relative error {error:.1e}"


@pytest.mark.parametrize("name", TOLERANCE)
def test_two_steps_of_the_engine_equal_two_conventional_steps(name):
    """LoRA B may start at zero, which hides A in the first step; so the second is compared too."""
    prompt, responses = random_ids(19, 1), [random_ids(n, n) for n in (3, 12)]

    def conventional(logprobs):
        num_tokens = sum(len(ids) for ids in responses)
        ratios = [(part - part.detach()).exp().sum() for part in logprobs]
        return -(0.8 * ratios[0] - 0.6 * ratios[1]) / num_tokens

    stock, model = tiny_model(name), tiny_model(name)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, eps=1e-3) for m in (stock, model)
    ]
    engine = Engine(model, chunk_tokens=C)
    group = ResponseGroup(Prompt(prompt), [Response(ids) for ids in responses], advantages=[0.8, -0.6])
    for step in (1, 2):
        want = full_gradients(stock, prompt, responses, conventional)
        norm = torch.nn.utils.clip_grad_norm_([p for p in stock.parameters() if p.requires_grad], 0.5)
        optimizers[0].step()
        engine.forward_backward([group], GRPO(loss_type="dapo"))
        report = engine.optimizer_step(optimizers[1], max_grad_norm=0.5)
        assert report.policy_version == step and report.stepped
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert worst_error(gradients(model), gradients(stock))[0] <= TOLERANCE[name] and want
