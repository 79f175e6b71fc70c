"""Sampling: greedy equals plain generate, its logprobs equal score, its filters keep what they should."""

import warnings

import pytest
import torch

from longstraw.execution.engine import Engine
from longstraw.execution.sample import keep_likely
from longstraw.grpo.losses import GRPO
from longstraw.parallel.topology import Topology
from longstraw.records import Prompt, ResponseGroup, SamplingSettings
from tiny import full_logprobs, random_ids, tiny_model

NAMES = [
    "llama",
    "qwen3",
    "gpt_oss",
    "gemma3_text",
    "qwen3_5_text",
    "qwen3_next",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_prompt_tokens", [1, 45])
def test_greedy_tokens_equal_plain_generate(name, num_prompt_tokens):
    prompt, model = random_ids(num_prompt_tokens, 1), tiny_model(name)
    engine = Engine(model, chunk_tokens=16)
    with engine.capture(Prompt(prompt)) as state:
        responses = engine.sample(state, 3, SamplingSettings(max_new_tokens=30, temperature=0))
    mask = torch.ones(1, num_prompt_tokens, dtype=torch.int64)
    want = model.generate(
        prompt[None], attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for response in responses:
        torch.testing.assert_close(response.token_ids, want[0, num_prompt_tokens:])


@pytest.mark.parametrize("name", NAMES)
def test_sampling_logprobs_equal_score_and_the_full_sequence(name):
    prompt, model = random_ids(45, 1), tiny_model(name)
    engine = Engine(model, chunk_tokens=16)
    settings = SamplingSettings(max_new_tokens=25, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, stop_ids=(5, 9))
    with engine.capture(Prompt(prompt)) as state:
        responses = engine.sample(state, 5, settings)
        for response, scored in zip(responses, engine.score(state, responses), strict=True):
            torch.testing.assert_close(response.sampling_logprobs, scored, rtol=0, atol=2e-4)
            full = full_logprobs(model, prompt, response.token_ids, 0.7).detach()
            torch.testing.assert_close(scored, full, rtol=0, atol=2e-4)


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("num_prompt_tokens", [7, 12, 30])
def test_a_window_slides_from_any_prompt_into_the_response(num_prompt_tokens, prompt_gradient):
    """The window is 12. Where it is cut off, the state of a prompt without gradient keeps no more than it."""
    prompt, model = random_ids(num_prompt_tokens, 1), tiny_model("gpt_oss", num_hidden_layers=2)
    engine = Engine(model, chunk_tokens=8, prompt_gradient=prompt_gradient)
    with engine.capture(Prompt(prompt)) as state:
        for response in engine.sample(state, 2, SamplingSettings(max_new_tokens=15)):
            want = full_logprobs(model, prompt, response.token_ids).detach()
            torch.testing.assert_close(response.sampling_logprobs, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v32"])
def test_a_bfloat16_model_is_sampled_with_the_logprobs_that_it_scores(name):
    """Past the window of 12 and the selection of 16. Half the tokens must agree well: a wrong key moves nearly all."""
    model = tiny_model(name, dtype=torch.bfloat16, num_hidden_layers=2)
    for part, module in model.named_modules():
        if part.endswith("weights_proj"):
            module.float()  # as checkpoints in half precision are loaded
    engine = Engine(model, chunk_tokens=16)
    with engine.capture(Prompt(random_ids(9, 1))) as state:
        responses = engine.sample(state, 4, SamplingSettings(max_new_tokens=10))
        scores = engine.score(state, responses)
    errors = [(r.sampling_logprobs - scored).abs() for r, scored in zip(responses, scores, strict=True)]
    assert all(r.sampling_logprobs.dtype == torch.float32 for r in responses)
    assert float(torch.cat(errors).median()) < 0.1


def model_on_rank(name, num_layers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what pyproject.toml excepts is not known to the ranks
        return tiny_model(name, num_hidden_layers=num_layers)


def sampled_from_one_token(world, name):
    engine = Engine(model_on_rank(name, 2), chunk_tokens=4, topology=Topology.create(context=world.degree))
    with engine.capture(Prompt(random_ids(1, 1))) as state:
        return engine.sample(state, 2, SamplingSettings(max_new_tokens=20))


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3", "deepseek_v32"])
def test_ranks_that_keep_nothing_of_the_prompt_sample_the_same(ranks, name):
    """Past the window of 12 and the selection of 16, also where all that a token attends to is on the other rank."""
    model = tiny_model(name, num_hidden_layers=2)
    for responses in ranks(2).run(sampled_from_one_token, name):
        for response in responses:
            want = full_logprobs(model, random_ids(1, 1), response.token_ids).detach()
            torch.testing.assert_close(response.sampling_logprobs, want, rtol=0, atol=2e-4)


def drawn_with_a_seed_of_its_own(world):
    model = model_on_rank("llama", 1)
    return drawn_from(Engine(model, chunk_tokens=4, topology=Topology.create(context=world.degree)), seed=world.rank)


def drawn_from(engine, seed):
    with engine.capture(Prompt(random_ids(10, 1))) as state:
        responses = engine.sample(state, 2, SamplingSettings(max_new_tokens=6, seed=seed))
    return [response.token_ids.tolist() for response in responses]


def test_what_the_first_rank_draws_all_ranks_have(ranks):
    """Ranks may round differently and then draw differently; here they would because of their seeds.

    The prompt's last token is the second of a chunk of two, so it is the second rank that ran it.
    """
    engine = Engine(tiny_model("llama", num_hidden_layers=1), chunk_tokens=4)
    assert drawn_from(engine, 0) != drawn_from(engine, 1)
    assert ranks(2).run(drawn_with_a_seed_of_its_own) == [drawn_from(engine, 0)] * 2


def test_importance_ratio_is_one_before_any_update():
    engine = Engine(tiny_model("qwen3_5_text"), chunk_tokens=16)
    prompt = Prompt(random_ids(45, 1))
    with engine.capture(prompt) as state:
        responses = engine.sample(state, 4, SamplingSettings(max_new_tokens=25, temperature=1.3))
        group = ResponseGroup(prompt, responses, rewards=[0, 1, 2, 3])
        metrics = engine.forward_backward([group], GRPO(), states=[state]).metrics
    assert metrics.importance_ratio_min == pytest.approx(1, abs=2e-4)
    assert metrics.importance_ratio_max == pytest.approx(1, abs=2e-4)


def test_responses_end_with_their_first_stop_id_or_are_truncated():
    engine = Engine(tiny_model("llama"), chunk_tokens=16)
    stops = (5, 17, 40, 77)
    with engine.capture(Prompt(random_ids(9, 1))) as state:
        responses = engine.sample(state, 16, SamplingSettings(max_new_tokens=20, stop_ids=stops, temperature=2.0))
    assert any(response.truncated for response in responses) and not all(response.truncated for response in responses)
    for response in responses:
        hits = torch.isin(response.token_ids, torch.tensor(stops))
        assert response.truncated == (not bool(hits[-1]))
        assert not bool(hits[:-1].any())
        assert len(response) == 20 or not response.truncated


def test_the_seed_alone_decides_the_draw():
    engine = Engine(tiny_model("llama"), chunk_tokens=16)
    with engine.capture(Prompt(random_ids(9, 1))) as state:

        def drawn(seed):
            torch.manual_seed(seed * 7 + 1)
            responses = engine.sample(state, 3, SamplingSettings(max_new_tokens=12, seed=seed))
            return [response.token_ids.tolist() for response in responses]

        assert drawn(1) == drawn(1) != drawn(2)
        assert len({tuple(ids) for ids in drawn(1)}) == 3


def test_the_checkpoints_generation_config_never_leaks_in():
    model = tiny_model("llama")
    engine = Engine(model, chunk_tokens=16)
    settings = SamplingSettings(max_new_tokens=12, seed=3)
    drawn = []
    for changed in (False, True):
        if changed:
            model.generation_config.update(top_k=1, temperature=0.01, repetition_penalty=5.0, max_new_tokens=2)
        with engine.capture(Prompt(random_ids(9, 1))) as state:
            drawn.append([response.token_ids.tolist() for response in engine.sample(state, 3, settings)])
    assert drawn[0] == drawn[1]


def probabilities(**settings):
    log_p = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]).log()
    return keep_likely(log_p, SamplingSettings(**settings)).softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    ("settings", "num_kept"),
    [({}, 5), ({"top_k": 2}, 2), ({"top_p": 0.69}, 2), ({"top_p": 0.71}, 3), ({"top_p": 1e-6}, 1), ({"min_p": 0.3}, 3)],
)
def test_filters_keep_the_likeliest(settings, num_kept):
    kept = probabilities(**settings)
    assert sum(p > 0 for p in kept) == num_kept and all(p > 0 for p in kept[:num_kept])


def test_top_p_looks_at_what_top_k_left():
    # Of the two tokens top-k leaves, the first has 0.4 / 0.7 = 0.571 of the probability.
    assert sum(p > 0 for p in probabilities(top_k=2, top_p=0.58)) == 2
    assert sum(p > 0 for p in probabilities(top_k=2, top_p=0.57)) == 1
