"""The presets have the published shapes: parameters, layer patterns, and what a token of state costs."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import longstraw as ls
from longstraw.models.adapters import with_adapter


@pytest.fixture(scope="module", params=["qwen3.6-27b", "glm-5.2"])
def outline(request):
    """A preset's model on the meta device."""
    with torch.device("meta"):
        return request.param, AutoModelForCausalLM.from_config(ls.preset_config(request.param))


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_number_of_parameters_is_the_published_one(outline):
    name, model = outline
    # Qwen: FACTS; GLM: the sum of its parts, 753B with the prediction layer that is not part of training.
    assert num_parameters(model) == {"qwen3.6-27b": 26_895_998_464, "glm-5.2": 743_377_000_704}[name]


def test_adapter_on_all_linear_layers_of_qwen_trains_the_published_number():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ls.preset_config("qwen3.6-27b"))
        adapted = with_adapter(model, ls.LoraSettings(r=16))
    assert sum(value.numel() for value in adapted.parameters() if value.requires_grad) == 116_727_808


def test_qwen_alternates_three_recurrent_layers_and_one_of_attention():
    config = ls.preset_config("qwen3.6-27b")
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 16
    full_layers = config.layer_types.count("full_attention")
    assert 2 * full_layers * config.num_key_value_heads * config.head_dim * 2 == 65_536  # K and V, two bytes each
    recurrent = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert round(48 * recurrent * 4 / 1e6) == 151  # MB at each boundary, float32


def test_glm_computes_the_choice_in_21_layers_and_shares_it_in_57():
    config = ls.preset_config("glm-5.2")
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, *range(1, 78, 4)]
    assert (len(full), config.indexer_types.count("shared")) == (21, 57)
    assert config.mlp_layer_types == ["dense"] * 3 + ["sparse"] * 75
    assert config.kv_lora_rank + config.qk_rope_head_dim == 576
    assert (config.index_head_dim, config.index_n_heads, config.index_topk) == (128, 32, 2048)
    assert 2 * 576 * 78 == 89_856 and 2 * 128 * len(full) == 5_376  # bytes a token


def test_indexers_of_glm_are_where_the_pattern_says(outline):
    name, model = outline
    layers = [n.split(".")[2] for n, module in model.named_modules() if n.endswith("indexer.wk")]
    expected = [] if name == "qwen3.6-27b" else [str(layer) for layer in (0, *range(1, 78, 4))]
    assert layers == expected
    assert all(module.weight.is_meta for module in model.modules() if isinstance(module, nn.Linear))


def test_presets_are_the_callers_own_to_change():
    ls.preset_config("glm-5.2").rope_parameters["rope_theta"] = 1.0
    assert ls.preset_config("glm-5.2").rope_parameters["rope_theta"] == 8e6


def test_unknown_preset_is_refused_with_the_nearest():
    with pytest.raises(ls.InputError, match=r"no preset 'glm5\.2'; there are .* did you mean glm-5\.2\?"):
        ls.preset_config("glm5.2")
