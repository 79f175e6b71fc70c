"""Small random models: every family has one, it shows what is its own, and wrong names are refused with the nearest."""

import pytest
import torch

import longstraw as ls
from longstraw.models.adapters import linear_layers_of_indexers
from longstraw.models.families import FAMILIES
from longstraw.models.tiny import ROUTER_BIAS, tiny_config
from tiny import random_ids
from tiny import tiny_model as tiny_model_of_tests

LATENT = ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
INDEXED = LATENT[1:]
IDS = random_ids(40, seed=1)[None]  # more than the 16 positions that tiny indexers choose
FLAT_STD = 0.25  # weights of std 0.02 give 0.11


def logits(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_small_model_whose_choices_are_not_flat(name):
    model = ls.tiny_model(name)
    assert model.config.model_type == name
    assert sum(parameter.numel() for parameter in model.parameters()) < 250_000
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    out = logits(model)
    assert out.shape == (40, 99)
    assert out.isfinite().all()
    assert out.std(dim=-1).mean() > FLAT_STD


def test_equal_arguments_give_equal_weights_and_leave_the_generator_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, other = (ls.tiny_model("llama", seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.parametrize("name", ["qwen3", "glm_moe_dsa"])
def test_tests_compare_the_same_weights(name):
    public = ls.tiny_model(name, seed=5).state_dict()
    assert all(
        torch.equal(value, public[n])
        for n, value in tiny_model_of_tests(name, adapter=False, seed=5).state_dict().items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", *LATENT])
def test_half_precision_runs_with_routers_in_float32(name, dtype):
    model = ls.tiny_model(name, dtype=str(dtype).removeprefix("torch."))
    kinds = {n: value.dtype for n, value in [*model.named_parameters(), *model.named_buffers()]}
    assert model.lm_head.weight.dtype == dtype
    assert all(kind == torch.float32 for n, kind in kinds.items() if n.endswith(("mlp.gate.weight", ROUTER_BIAS)))
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("name", INDEXED)
def test_tiny_indexers_leave_positions_out(name):
    sparse, dense = logits(ls.tiny_model(name)), logits(ls.tiny_model(name, index_topk=512))
    torch.testing.assert_close(sparse[:16], dense[:16], rtol=0, atol=1e-4)
    assert (sparse[20:] - dense[20:]).abs().max() > 0.1


@pytest.mark.parametrize("name", LATENT)
def test_tiny_routers_have_a_correction_bias_that_matters(name):
    model = ls.tiny_model(name)
    biased = logits(model)
    biases = [buffer for n, buffer in model.named_buffers() if n.endswith(ROUTER_BIAS)]
    assert len(biases) == 3, "one layer of four is dense"
    for bias in biases:
        bias.zero_()
    assert (logits(model) - biased).abs().max() > 0.1


@pytest.mark.parametrize("name", LATENT)
def test_only_indexers_get_no_gradient(name):
    model = ls.tiny_model(name)
    model(IDS, use_cache=False).logits.square().sum().backward()
    without = {n.rpartition(".")[0] for n, value in model.named_parameters() if value.grad is None}
    assert without - {n for n in without if n.endswith("k_norm")} == set(linear_layers_of_indexers(model))
    assert all(".indexer." in n for n in without)


def test_deepseek_without_low_rank_queries_has_one_query_projection():
    model = ls.tiny_model("deepseek_v3", q_lora_rank=None)
    assert model.model.layers[0].self_attn.q_proj.out_features == 4 * 20
    assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("name", "key", "pattern"),
    [("glm_moe_dsa", "indexer_types", "FSSF"), ("qwen3", "layer_types", "sf"), ("deepseek_v32", "mlp_layer_types", "")],
)
@pytest.mark.parametrize("num_layers", [1, 6, 9])
def test_patterns_over_layers_follow_their_number(name, key, pattern, num_layers):
    config = tiny_config(name, num_hidden_layers=num_layers)
    short = "".join(kind[0].upper() if key == "indexer_types" else kind[0] for kind in getattr(config, key))
    assert short == ((pattern * num_layers)[:num_layers] or "d" + "s" * (num_layers - 1))
    assert logits(ls.tiny_model(name, num_hidden_layers=num_layers)).isfinite().all()


def test_given_pattern_wins_and_is_repeated_too():
    types = ["full", "full", "shared"]
    config = tiny_config("glm_moe_dsa", num_hidden_layers=5, indexer_types=types)
    assert config.indexer_types == [*types, *types[:2]]


def test_adapter_is_the_one_that_load_model_puts_on():
    with pytest.warns(UserWarning, match="leaves out the 6 linear layers of the indexers"):
        model = ls.tiny_model("glm_moe_dsa", adapter=ls.LoraSettings(r=3))
    trained = {n: value for n, value in model.named_parameters() if value.requires_grad}
    assert trained
    assert all("lora_" in n and ".indexer." not in n for n in trained)
    assert all(bool((value == 0).all()) == ("lora_B" in n) for n, value in trained.items())
    with pytest.raises(ls.InputError, match="would train nothing"):
        ls.tiny_model("llama", adapter=ls.LoraSettings(target_modules=["wk"]))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("glm_moe_dsq", {}, "'glm_moe_dsq' is not supported; did you mean glm_moe_dsa"),
        ("gemma2", {}, "'gemma2' is not supported; did you mean gemma"),
        ("zzz", {}, r"'zzz' is not supported\."),
        ("llama", {"num_layers": 2}, "llama has no setting 'num_layers'; did you mean num_"),
        ("llama", {"index_topk": 2}, r"llama has no setting 'index_topk'"),
        ("llama", {"dtype": "bf16"}, "'bf16' is not supported"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_the_nearest(name, settings, words):
    with pytest.raises(ls.InputError, match=words):
        ls.tiny_model(name, **settings)
