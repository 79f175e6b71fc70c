"""The engine on a CUDA device: the same properties as on a CPU. Skipped where there is none."""

import pytest
import torch

from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.ops import kernels
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings
from tiny import full_gradients, gradients, random_ids, tiny_model, worst_error

pytestmark = pytest.mark.gpu
PROMPT = random_ids(150, 1)
RESPONSES = [random_ids(n, n) for n in (40, 1, 7)]


def loss(logprobs):
    return -sum(part.mean() for part in logprobs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_keys", [64, 100])
def test_flash_kernel_agrees_with_plain_products(causal, num_keys):
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 3, num_keys, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = kernels.attend(q, k, v, scale=0.125, causal=causal)
    plain_out, plain_lse = kernels.plain_attend(q.float(), k.float(), v.float(), scale=0.125, causal=causal)
    torch.testing.assert_close(out.float(), plain_out, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.float(), plain_lse, rtol=0, atol=2e-2)
    grads = kernels.attend_backward(d_out, (q, k, v), out, lse, scale=0.125, causal=causal)
    wide = [x.float() for x in (q, k, v)]
    plain = kernels.plain_attend_backward(d_out.float(), wide, plain_out, plain_lse, scale=0.125, causal=causal)
    for got, want in zip(grads, plain, strict=True):
        assert (got.float() - want).norm() / want.norm() < 2e-2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "qwen3_5_text"])
def test_exact_gradient_equals_full_sequence_autograd(name):
    want = full_gradients(tiny_model(name).cuda(), PROMPT, RESPONSES, loss)
    model = tiny_model(name).cuda()
    group = ResponseGroup(Prompt(PROMPT), [Response(ids) for ids in RESPONSES])
    Engine(model, chunk_tokens=32).forward_backward([group], loss)
    assert worst_error(gradients(model), want)[0] <= (5e-4 if name == "qwen3_5_text" else 5e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5_text"])
def test_bfloat16_error_is_no_worse_than_that_of_the_full_sequence(name):
    settings = {"head_dim": 64}
    exact = full_gradients(tiny_model(name, **settings).cuda(), PROMPT, RESPONSES, loss)
    full = full_gradients(tiny_model(name, dtype=torch.bfloat16, **settings).cuda(), PROMPT, RESPONSES, loss)
    model = tiny_model(name, dtype=torch.bfloat16, **settings).cuda()
    group = ResponseGroup(Prompt(PROMPT), [Response(ids) for ids in RESPONSES])
    Engine(model, chunk_tokens=32).forward_backward([group], loss)

    def total_error(got):
        return sum(float((got[n].float() - exact[n]).square().sum()) for n in exact) ** 0.5

    assert total_error(gradients(model)) <= 1.1 * total_error(full)


def test_sampling_logprobs_equal_score():
    model = tiny_model("qwen3_5_text").cuda()
    engine, prompt = Engine(model, chunk_tokens=32), Prompt(PROMPT)
    with engine.capture(prompt) as state:
        responses = engine.sample(state, 4, SamplingSettings(max_new_tokens=20, temperature=0.8))
        for response, scored in zip(responses, engine.score(state, responses), strict=True):
            torch.testing.assert_close(response.sampling_logprobs, scored.cpu(), rtol=0, atol=5e-4)
        group = ResponseGroup(prompt, responses, rewards=[0, 1, 2, 3])
        engine.forward_backward([group], GRPO(), states=[state])
    trained = [p for p in model.parameters() if p.requires_grad]
    assert engine.optimizer_step(torch.optim.AdamW(trained), max_grad_norm=1.0).stepped
