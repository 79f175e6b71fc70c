"""Which parameters belong to single experts, their parts, and the whole again; adapters that peft draws as if whole."""

import warnings

import pytest
import torch

from longstraw.errors import UnsupportedError
from longstraw.models.adapters import LoraSettings, with_adapter
from longstraw.models.experts import (
    Part,
    as_if_whole,
    divide_experts,
    divided_experts,
    expert_parameters,
    experts_modules,
    joined,
    num_routed_experts,
)
from tiny import WITH_EXPERTS, adapted_with_experts, tiny_model


def model_of(name, *, adapter=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(name, adapter=False)
        torch.manual_seed(1)
        return adapted_with_experts(model) if adapter else model


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_family_has_experts_that_divide_and_join_again(name):
    whole = dict(model_of(name).named_parameters())
    halves = [model_of(name) for _ in range(2)]
    layouts = expert_parameters(halves[0])
    for rank, model in enumerate(halves):
        divide_experts(model, Part(2, rank))
    parts = [dict(model.named_parameters()) for model in halves]
    assert sum("lora_" in key for key in layouts) == 4 * len(experts_modules(halves[0]))
    for key, (layout, num_experts) in layouts.items():
        assert parts[0][key].numel() * 2 == whole[key].numel()
        assert torch.equal(joined([part[key] for part in parts], layout, num_experts // 2), whole[key])
    for key in whole.keys() - layouts.keys():
        assert torch.equal(parts[0][key], whole[key])
    assert num_routed_experts(halves[0]) == num_routed_experts(model_of(name))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm_moe_dsa"])
def test_local_experts_compute_what_they_compute_in_the_whole_layer(name):
    """Adapters included: an expert's outputs do not depend on which others are there."""
    whole, half = model_of(name).eval(), model_of(name).eval()
    divide_experts(half, Part(2, 1))
    calls = {}
    for model in (whole, half):
        owner = {id(m): n for n, m in experts_modules(model).items()}
        path = next(n for n in owner.values()).partition(".experts")[0]
        wrapper = model.get_submodule(path).experts
        rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(3))
        num_experts = next(iter(num_routed_experts(model)))
        choice = torch.arange(6)[:, None] % (num_experts // 2)
        for forward in divided_experts(model):
            forward.dispatch = lambda layer, h, index, w: layer.run_local(h, index, w)
        if model is whole:
            choice = choice + num_experts // 2
        calls[model is whole] = wrapper(rows, choice, torch.full((6, 1), 0.7)).detach()
    torch.testing.assert_close(calls[False], calls[True], rtol=1e-5, atol=1e-6)
    assert calls[True].abs().max() > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_put_on_a_part_is_the_part_of_an_adapter_put_on_the_whole(name):
    settings = LoraSettings(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"])
    whole, part = model_of(name, adapter=False), model_of(name, adapter=False)
    divide_experts(part, Part(2, 1))
    num_bytes = {key: p.untyped_storage().nbytes() for key, p in part.named_parameters()}
    models = []
    for model in (whole, part):
        torch.manual_seed(4)
        models.append(with_adapter(model, settings))
    divide_experts(models[0], Part(2, 1))
    want, got = (dict(model.named_parameters()) for model in models)
    assert want.keys() == got.keys()
    assert [key for key in want if not torch.equal(want[key], got[key])] == []
    assert all(p.untyped_storage().nbytes() == num_bytes[key] for key, p in part.named_parameters() if key in num_bytes)


@pytest.mark.parametrize(("layout", "shape"), [("front", (4, 6)), ("interleaved", (6, 4))])
def test_a_part_does_not_keep_the_whole_alive(layout, shape):
    """Also of an adapter of rank 1, where a part is a plain slice."""
    part = Part(2, 1).of(torch.zeros(shape), layout, 4)
    assert part.numel() == 12
    assert part.untyped_storage().nbytes() == 12 * 4


def test_whole_shapes_take_no_memory_and_go_when_the_block_ends():
    model = model_of("qwen3_moe", adapter=False)
    divide_experts(model, Part(4, 2))
    with as_if_whole(model):
        module = next(iter(experts_modules(model).values()))
        assert module.gate_up_proj.shape[0] == module.num_experts == 4
        assert module.gate_up_proj.untyped_storage().nbytes() == 4
    assert module.gate_up_proj.shape[0] == module.num_experts == 1


def test_whole_shapes_go_also_when_peft_refuses_the_adapter():
    model = model_of("qwen3_moe", adapter=False)
    divide_experts(model, Part(2, 1))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    with pytest.raises(ValueError, match="no such layer"), as_if_whole(model):
        raise ValueError("no such layer")
    assert [key for key, p in model.named_parameters() if not torch.equal(p, before[key])] == []
    assert [module.num_experts for module in experts_modules(model).values()] == [2] * len(divided_experts(model))


def test_a_gradient_of_the_whole_layer_goes_when_its_experts_are_divided():
    model = model_of("qwen3_moe")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    divide_experts(model, Part(2, 0))
    of_experts = expert_parameters(model)
    assert {key for key, p in model.named_parameters() if p.grad is None} == set(of_experts)


def test_one_expert_on_a_rank_may_have_an_adapter_where_it_is_not_transposed():
    model = model_of("qwen3_moe")
    whole = dict(model_of("qwen3_moe").named_parameters())
    layouts = expert_parameters(model)
    divide_experts(model, Part(4, 3))
    for key, parameter in model.named_parameters():
        if key in layouts:
            assert torch.equal(parameter, Part(4, 3).of(whole[key], *layouts[key])), key


@pytest.mark.parametrize("shape", [(33, 1), (0,), ()], ids=str)
def test_experts_that_are_not_side_by_side_cannot_be_divided(shape):
    """As packed 4-bit weights are: their rows are not the experts."""
    model = model_of("qwen3_moe", adapter=False)
    *_, (name, last) = experts_modules(model).items()
    last.down_proj = torch.nn.Parameter(torch.zeros(shape))
    before = {key: p.shape for key, p in model.named_parameters()}
    with pytest.raises(UnsupportedError, match=rf"{name}\.down_proj of shape .* 4 experts side by side"):
        divide_experts(model, Part(2, 0))
    assert {key: p.shape for key, p in model.named_parameters()} == before
    assert not divided_experts(model)


def test_a_divided_model_says_that_it_cannot_run_alone():
    model = model_of("qwen3_moe", adapter=False)
    divide_experts(model, Part(2, 0))
    with pytest.raises(UnsupportedError, match="2 of a layer's 4 experts; give it to an Engine"):
        model(torch.tensor([[3, 4]]))


def test_adapters_that_cannot_be_divided_are_refused_before_anything_changes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        biased = with_adapter(
            model_of("gpt_oss", adapter=False),
            LoraSettings(
                r=2,
                target_modules=["q_proj"],
                target_parameters=["layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj_bias"],
            ),
        )
    for model, degree, sentence in (
        (biased, 2, "an adapter on gate_up_proj_bias, which has one row for each expert"),
        (model_of("gpt_oss"), 4, "needs at least two experts on a rank"),
    ):
        before = {key: p.shape for key, p in model.named_parameters()}
        with pytest.raises(UnsupportedError, match=sentence):
            divide_experts(model, Part(degree, 0))
        assert {key: p.shape for key, p in model.named_parameters()} == before
        assert not divided_experts(model)
