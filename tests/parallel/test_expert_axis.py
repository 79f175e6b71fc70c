"""One update with routed experts divided over ranks is the update of one process."""

import warnings

import pytest
import torch

from longstraw.errors import UnsupportedError
from longstraw.execution.engine import Engine
from longstraw.models.experts import Part, divided_experts, expert_parameters
from longstraw.parallel.gradients import ParameterClass, sum_gradients
from longstraw.parallel.topology import Axis, Topology
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings
from tiny import adapted_with_experts, gradients, random_ids, tiny_model, worst_error

CHUNK = 16
HYBRID = 1e-4
NAMES = ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text", "deepseek_v3", "glm_moe_dsa"]
# With one token to an expert and 8 experts, some are idle in every chunk.
SETTINGS = {
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=1),
    "mixtral": dict(num_local_experts=8),
    "gpt_oss": dict(num_local_experts=8),
    "qwen3_5_moe_text": dict(num_experts=8),
    "deepseek_v3": {},
    "glm_moe_dsa": dict(n_routed_experts=8, num_experts_per_tok=3),
}


def objective(logprobs):
    return sum((-1.0) ** index * (1 + index / 3) * part.sum() for index, part in enumerate(logprobs)) / 10


def group():
    return ResponseGroup(Prompt(random_ids(45, 1)), [Response(random_ids(n, n)) for n in (1, 7, 19)])


def model_of(name, *, adapter=True):
    """As in test_context_axis: weights small enough that two orders of a float32 sum stay below 1e-5 apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = {} if "qwen3_5" in name else {"num_hidden_layers": 2}
        model = tiny_model(name, adapter=False, **layers, **SETTINGS[name])
        for parameter in model.parameters():
            if parameter.dim() > 1 and layers:
                parameter.data *= 2 / 3
        torch.manual_seed(5)
        return adapted_with_experts(model).eval() if adapter else model.requires_grad_(True)


def two_steps(engine, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
    seen = []
    for _ in range(2):
        engine.forward_backward([group()], objective)
        report = engine.optimizer_step(optimizer, max_grad_norm=0.5)
        assert report.stepped
        seen.append((gradients(model), report.grad_norm))
    return seen


def divided_steps(world, name, degrees, settings, adapter):
    model = model_of(name, adapter=adapter)
    topology = Topology.create(**degrees)
    engine = Engine(model, chunk_tokens=CHUNK, topology=topology, **settings)
    seen = two_steps(engine, model)
    parameters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return seen, parameters, expert_parameters(model), topology.expert.rank


def assert_equal_to_one_process(name, results, want, degree, tolerance):
    for seen, parameters, layouts, rank in results:
        part = Part(degree, rank)
        assert any(name in parameters for name in layouts), "experts are trained"
        for (got, norm), (whole, whole_norm) in zip(seen, want, strict=True):
            mine = {
                key: part.of(value, layouts[key][0], layouts[key][1] * degree) if key in layouts else value
                for key, value in whole.items()
            }
            error, tensor = worst_error(got, mine)
            assert error <= tolerance, f"{tensor}: relative error {error:.1e}"
            assert norm == pytest.approx(whole_norm, rel=tolerance)
        for key, value in parameters.items():
            same = [other[key] for _, other, _, its_rank in results if key not in layouts or its_rank == rank]
            assert all(torch.equal(value, copy) for copy in same), f"{key} differs between its copies"


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_over_two_steps_is_that_of_one_process(ranks, name):
    model = model_of(name)
    want = two_steps(Engine(model, chunk_tokens=CHUNK), model)
    results = ranks(2).run(divided_steps, name, dict(context=2, expert=2), {}, True)
    assert_equal_to_one_process(name, results, want, 2, HYBRID if "qwen3_5" in name else 1e-5)


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        (dict(context=4, expert=2), {}),
        (dict(context=4, expert=4), {"graph_scope": "chunk"}),
        (dict(context=2, data=2, expert=2), {}),
        (dict(context=4, expert=4), {"prompt_gradient": "stopped"}),
    ],
    ids=str,
)
def test_experts_divide_beside_other_axes_and_settings(ranks, degrees, settings):
    """On a data axis both context axes take the same group: twice the sums, over twice the denominator."""
    model = model_of("glm_moe_dsa")
    engine = Engine(model, chunk_tokens=CHUNK, **settings)
    want = two_steps(engine, model)
    if "data" in degrees:  # a user's function is not divided by anything
        want = two_steps_twice(model_of("glm_moe_dsa"), settings)
    results = ranks(4).run(divided_steps, "glm_moe_dsa", degrees, settings, True)
    assert_equal_to_one_process("glm_moe_dsa", results, want, degrees["expert"], 1e-5)


def two_steps_twice(model, settings):
    engine = Engine(model, chunk_tokens=CHUNK, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    seen = []
    for _ in range(2):
        engine.forward_backward([group(), group()], objective)
        report = engine.optimizer_step(optimizer, max_grad_norm=0.5)
        seen.append((gradients(model), report.grad_norm))
    return seen


def test_full_parameters_of_experts_and_routers_are_trained(ranks):
    model = model_of("qwen3_moe", adapter=False)
    want = two_steps(Engine(model, chunk_tokens=CHUNK), model)
    assert any("mlp.gate.weight" in name for name in want[0][0])
    results = ranks(2).run(divided_steps, "qwen3_moe", dict(context=2, expert=2), {}, False)
    assert_equal_to_one_process("qwen3_moe", results, want, 2, 1e-5)


def sampled(engine):
    with engine.capture(Prompt(random_ids(45, 1))) as state:
        responses = engine.sample(state, 3, SamplingSettings(max_new_tokens=12, temperature=0))
        return [r.token_ids for r in responses], engine.score(state, responses)


def sampled_on_ranks(world, name):
    return sampled(
        Engine(model_of(name), chunk_tokens=CHUNK, topology=Topology.create(context=world.degree, expert=world.degree))
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "glm_moe_dsa"])
def test_greedy_samples_and_scores_equal_those_of_one_process(ranks, name):
    want_ids, want_scores = sampled(Engine(model_of(name), chunk_tokens=CHUNK))
    for ids, scores in ranks(2).run(sampled_on_ranks, name):
        for response in range(3):
            assert torch.equal(ids[response], want_ids[response])
            torch.testing.assert_close(scores[response], want_scores[response], rtol=0, atol=2e-4)


def memory_of_experts(world):
    model = model_of("qwen3_moe", adapter=False)
    names = list(expert_parameters(model))
    whole = sum(dict(model.named_parameters())[name].numel() for name in names)
    parameters = [dict(model.named_parameters())[name] for name in names]
    Engine(model, chunk_tokens=CHUNK, topology=Topology.create(context=world.degree, expert=world.degree))
    assert all(p is dict(model.named_parameters())[n] for n, p in zip(names, parameters, strict=True))
    return whole, sum(p.untyped_storage().nbytes() // p.element_size() for p in parameters)


def test_a_rank_holds_its_part_of_the_experts_only(ranks):
    for whole, held in ranks(2).run(memory_of_experts):
        assert held == whole / 2


def refusals(world):
    told = []
    for name, degrees in (("llama", 2), ("qwen3_moe", 4)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = tiny_model(name, num_hidden_layers=2, **({"num_experts": 6} if name == "qwen3_moe" else {}))
        with pytest.raises(UnsupportedError) as caught:
            Engine(model, topology=Topology.create(context=4, expert=degrees))
        told.append(str(caught.value))
    model = model_of("qwen3_moe")
    Engine(model, topology=Topology.create(context=4, expert=2))
    with pytest.raises(UnsupportedError) as caught:
        Engine(model, topology=Topology.create(context=4, expert=4))
    told.append(str(caught.value).partition(" and this is rank")[0])
    assert len(divided_experts(model)) == 2
    return told


def test_what_does_not_divide_is_refused_with_one_sentence_on_all_ranks(ranks):
    results = ranks(4).run(refusals)
    dense, six, other = results[0]
    assert "no routed experts to divide; set expert to 1" in dense
    assert "expert=4 does not divide the model's 6 routed experts" in six
    assert "part 0 of 2 of its experts, but expert=4" in other
    assert all(each[:2] == results[0][:2] for each in results)


def gradients_of_parts(world):
    experts = ParameterClass({"e": torch.zeros(3), "never": torch.zeros(2)}, Axis(), world.axis)
    mine = {"e": torch.ones(3) if world.rank == 0 else None, "never": None}
    return [g if g is None else g.tolist() for g in sum_gradients(experts, mine, world.traffic).values()]


def test_experts_without_a_token_have_a_gradient_of_zeros_if_other_ranks_experts_have_one(ranks):
    assert ranks(2).run(gradients_of_parts) == [[[1, 1, 1], None], [[0, 0, 0], None]]
