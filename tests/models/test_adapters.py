"""The adapter: where it goes, what it leaves alone, and which wish is refused in which words."""

import warnings

import pytest
import torch
from peft import PeftModel
from torch import nn

from longstraw.errors import InputError
from longstraw.models.adapters import LoraSettings, check_targets, linear_layers_of_indexers, with_adapter
from longstraw.models.saving import load_adapter, save_trained
from tiny import random_ids, tiny_model

INDEXED = ["deepseek_v32", "glm_moe_dsa"]
INDEXER_NAMES = {"wq_b", "wk", "weights_proj"}


def adapted_names(model):
    """Full names of the modules that carry trained adapter weights."""
    names = {name.partition(".lora_")[0] for name, value in model.named_parameters() if value.requires_grad}
    return {name.removeprefix("base_model.model.") for name in names}


def plain(name, **settings):
    return tiny_model(name, adapter=False, **settings)


def test_alpha_left_out_is_twice_the_rank():
    scales = [
        with_adapter(plain("llama"), settings).base_model.model.model.layers[0].mlp.up_proj.scaling["default"]
        for settings in (LoraSettings(r=4), LoraSettings(r=4, alpha=6.0))
    ]
    assert scales == [2.0, 1.5]


@pytest.mark.parametrize("targets", [["q_proj", "mlp.up_proj"], r".*\.(q|up)_proj"])
def test_adapter_goes_where_names_or_a_pattern_say(targets):
    names = adapted_names(with_adapter(plain("llama"), LoraSettings(target_modules=targets)))
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "up_proj"}
    assert len(names) == 4 * 2


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_get_an_adapter_by_parameter_name(name):
    settings = LoraSettings(r=2, target_modules=(), target_parameters=["experts.gate_up_proj"])
    names = adapted_names(with_adapter(plain(name), settings))
    assert names
    assert all(".experts" in name for name in names)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "qwen2_moe", "qwen3_next", "deepseek_v3", *INDEXED])
def test_all_linear_is_every_linear_layer_but_the_head_and_the_indexers(name):
    model = plain(name)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    indexers = {name for name in linear if name.rpartition(".")[2] in INDEXER_NAMES}
    assert len(indexers) == 3 * {"deepseek_v32": 4, "glm_moe_dsa": 2}.get(name, 0)
    assert set(linear_layers_of_indexers(model)) == indexers
    adapted = with_adapter(model, LoraSettings(r=2))
    assert isinstance(adapted, PeftModel)
    assert adapted_names(adapted) == linear - indexers - {"lm_head"}
    assert not any(name.endswith(".gate") for name in adapted_names(adapted)), "routers are not linear layers"


@pytest.mark.parametrize("name", INDEXED)
def test_every_adapter_of_all_linear_gets_a_gradient(name):
    adapted = with_adapter(plain(name), LoraSettings(r=2))
    adapted(random_ids(40, 1)[None]).logits.square().sum().backward()
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert [name for name, value in trained.items() if value.grad is None] == []


@pytest.mark.parametrize("name", INDEXED)
def test_all_linear_says_once_that_it_leaves_the_indexers_out(name):
    with pytest.warns(UserWarning, match="a choice has no gradient") as caught:
        check_targets(plain(name), LoraSettings())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_targets(plain(name), LoraSettings(target_modules=["o_proj"]))
        check_targets(plain("deepseek_v3"), LoraSettings())


@pytest.mark.parametrize("targets", [["wk", "kv_b_proj"], r".*\.(wk|kv_b_proj)"])
def test_indexers_named_beside_others_are_allowed(targets):
    settings = LoraSettings(r=2, target_modules=targets)
    check_targets(plain("deepseek_v32"), settings)
    names = adapted_names(with_adapter(plain("deepseek_v32"), settings))
    assert {name.rpartition(".")[2] for name in names} == {"wk", "kv_b_proj"}


@pytest.mark.parametrize(
    ("targets", "parameters", "named"),
    [
        (["wk", "wq_b"], [], "wk, wq_b are"),
        (["indexer.weights_proj"], [], "weights_proj are"),
        (r".*indexer\.w.*", [], "weights_proj, wk, wq_b are"),
        ([], ["wk.weight"], "weight are"),
    ],
)
def test_adapter_on_indexers_alone_is_refused(targets, parameters, named):
    settings = LoraSettings(target_modules=targets, target_parameters=parameters)
    with pytest.raises(InputError, match=f"{named} parts of indexers only.* would train nothing"):
        check_targets(plain("glm_moe_dsa"), settings)
    experts = LoraSettings(target_modules=targets, target_parameters=[*parameters, "experts.down_proj"])
    check_targets(plain("glm_moe_dsa"), experts)


@pytest.mark.parametrize(
    "settings", [{"r": 0}, {"alpha": 0.0}, {"target_modules": ()}, {"target_modules": ""}, {"r": -3}]
)
def test_adapter_that_would_train_nothing_is_refused_when_it_is_described(settings):
    with pytest.raises(InputError, match="would train nothing"):
        LoraSettings(**settings)


def test_single_name_that_fits_nothing_is_warned_of_with_the_nearest():
    with pytest.warns(UserWarning, match="called vproj; did you mean v_proj"):
        check_targets(plain("llama"), LoraSettings(target_modules=["q_proj", "vproj"]))


def test_names_are_looked_up_on_a_model_without_memory():
    with torch.device("meta"):
        model = plain("llama")
    with pytest.raises(InputError, match=r"qproj fits no module or parameter.* q_proj"):
        check_targets(model, LoraSettings(target_modules=["qproj"]))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa", "qwen3_moe"])
def test_adapter_comes_back_from_its_folder_bit_for_bit(name, tmp_path):
    settings = LoraSettings(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    first, second = with_adapter(plain(name), settings), with_adapter(plain(name), settings)
    for parameter in first.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    save_trained(first, tmp_path)
    load_adapter(second, tmp_path)
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())


@pytest.mark.parametrize(
    "targets", [["q_b_proj", "q_proj", "shared_expert.down_proj", "shared_experts.down_proj"], r".*mlp\.shared.*_proj"]
)
@pytest.mark.parametrize("name", ["qwen3_next", "glm_moe_dsa"])
def test_names_mean_linear_layers_where_peft_would_take_the_fused_experts(name, targets):
    names = adapted_names(with_adapter(plain(name), LoraSettings(r=2, target_modules=targets)))
    assert any(".shared_expert" in name for name in names)
    assert not any(name.endswith("mlp.experts") for name in names)
