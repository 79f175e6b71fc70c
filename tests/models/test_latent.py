"""The absorbed projection does what `kv_b_proj` does, from both sides and with every kind of adapter on it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from longstraw.errors import UnsupportedError
from longstraw.execution.engine import Engine
from longstraw.models.decoder import Decoder
from longstraw.models.latent import HeadProjection
from tiny import tiny_model

HEADS, KEY, VALUE, LATENT = 3, 5, 7, 11


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (KEY + VALUE), bias=False)


def adapted(*, num_adapters=1, **settings):
    torch.manual_seed(0)
    model = get_peft_model(
        Projection(), LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False, **settings)
    )
    for index in range(1, num_adapters):
        model.add_adapter(f"other{index}", LoraConfig(r=3, target_modules=["kv_b_proj"], init_lora_weights=False))
    if num_adapters > 1:
        model.base_model.set_adapter(["default", *(f"other{index}" for index in range(1, num_adapters))])
    return model.double()


def draw():
    generator = torch.Generator().manual_seed(1)
    shapes = ((9, LATENT), (HEADS, 4, KEY), (HEADS, 4, 9))
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def expanded(module, latent_NL, q_HTN, weights_HTN):
    """Scores and weighted values by expanding every latent, as the stock forward does."""
    key_NHN, value_NHV = module(latent_NL).unflatten(-1, (HEADS, -1)).split([KEY, VALUE], -1)
    scores = torch.einsum("htd,nhd->htn", q_HTN, key_NHN)
    return scores, torch.einsum("htn,nhv->htv", weights_HTN, value_NHV)


def absorbed(module, latent_NL, q_HTN, weights_HTN):
    up = HeadProjection(module, HEADS, KEY)
    return up.absorb(q_HTN[None])[0] @ latent_NL.T, up.expand((weights_HTN @ latent_NL)[None])[0]


@pytest.mark.parametrize(
    "make", [adapted, lambda: adapted(num_adapters=2), lambda: adapted(use_rslora=True), lambda: Projection().double()]
)
def test_absorbed_projection_equals_expanded_keys_and_values_in_values_and_gradients(make):
    got_model, want_model = make(), make()
    want_model.load_state_dict(got_model.state_dict())
    for parameter in (*got_model.parameters(), *want_model.parameters()):
        parameter.requires_grad_()
    draw = torch.Generator().manual_seed(1)
    latent, q, weights = (
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((9, LATENT), (HEADS, 4, KEY), (HEADS, 4, 9))
    )
    results = []
    for function, model in ((absorbed, got_model), (expanded, want_model)):
        module = next(m for name, m in model.named_modules() if name.endswith("kv_b_proj"))
        scores, values = function(module, latent, q, weights)
        (scores.sin().sum() + values.sin().sum()).backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append((scores, values, grads))
    (scores, values, grads), (want_scores, want_values, want_grads) = results
    torch.testing.assert_close(scores, want_scores)
    torch.testing.assert_close(values, want_values)
    for name, want in want_grads.items():
        torch.testing.assert_close(grads[name], want, msg=name)


def test_with_adapters_off_only_the_weight_acts():
    model = adapted()
    module = next(m for name, m in model.named_modules() if name.endswith("kv_b_proj"))
    draw = torch.Generator().manual_seed(1)
    latent, q, weights = (
        torch.randn(shape, dtype=torch.float64, generator=draw)
        for shape in ((9, LATENT), (HEADS, 4, KEY), (HEADS, 4, 9))
    )
    with model.disable_adapter():
        for got, want in zip(absorbed(module, latent, q, weights), expanded(module, latent, q, weights), strict=True):
            torch.testing.assert_close(got, want)
    assert not torch.allclose(
        absorbed(module, latent, q, weights)[0], expanded(module.base_layer, latent, q, weights)[0]
    )


def test_a_small_adapter_is_not_lost_to_the_rounding_of_a_bfloat16_weight():
    """Added to a bf16 weight a change of less than its last bit would vanish, every time and everywhere."""
    torch.manual_seed(0)
    linear = nn.Linear(64, HEADS * (KEY + VALUE), bias=False, dtype=torch.bfloat16)
    model = get_peft_model(nn.Sequential(linear), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    lora = model.base_model.model[0]
    for parameter in (lora.lora_A["default"].weight, lora.lora_B["default"].weight):
        parameter.data = parameter.data.float() * 0.03
    q = torch.randn(1, HEADS, 500, KEY).to(torch.bfloat16)
    with torch.no_grad():
        with_adapter = HeadProjection(lora, HEADS, KEY).absorb(q).float()
        with model.disable_adapter():
            change = with_adapter - HeadProjection(lora, HEADS, KEY).absorb(q).float()
        delta_HOL = (lora.lora_B["default"].weight @ lora.lora_A["default"].weight).unflatten(0, (HEADS, -1))
        want = q.float() @ delta_HOL[:, :KEY] * lora.scaling["default"]
    assert float(delta_HOL.abs().max()) < float(linear.weight.abs().median()) / 256, "below half of the last bit"
    slope = float((change * want).sum() / want.square().sum())
    assert slope == pytest.approx(1, abs=0.25)


def test_an_adapter_on_a_bfloat16_weight_acts_from_both_sides_with_all_its_digits():
    """With a weight of zero outputs are the adapter's alone: rounded once, to the dtype of what came in."""
    linear = nn.Linear(LATENT, HEADS * (KEY + VALUE), bias=False, dtype=torch.bfloat16)
    linear.weight.data.zero_()
    lora = get_peft_model(
        nn.Sequential(linear), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    ).base_model.model[0]
    for factor in (lora.lora_A["default"], lora.lora_B["default"]):
        factor.float()
        nn.init.normal_(factor.weight)
    up = HeadProjection(lora, HEADS, KEY)
    q, out = (torch.randn(2, HEADS, 50, width).to(torch.bfloat16) for width in (KEY, LATENT))
    a_RL, b_OR = (factor["default"].weight.double() for factor in (lora.lora_A, lora.lora_B))
    key_HNL, value_HVL = (b_OR @ a_RL * lora.scaling["default"]).unflatten(0, (HEADS, -1)).split([KEY, VALUE], 1)
    for got, want in ((up.absorb(q), q.double() @ key_HNL), (up.expand(out), out.double() @ value_HVL.mT)):
        torch.testing.assert_close(got, want.to(torch.bfloat16), rtol=2**-7, atol=1e-4)


def test_of_several_adapters_those_act_that_are_active_and_on_the_projection():
    torch.manual_seed(0)
    base = Projection()
    base.o_proj = nn.Linear(4, 4)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False))
    model.add_adapter("inactive", LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False))
    model.add_adapter("elsewhere", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "elsewhere"])
    module, given = model.double().base_model.model.kv_b_proj, draw()
    assert module.active_adapters == ["default", "elsewhere"] and "elsewhere" not in module.lora_A
    for got, want in zip(absorbed(module, *given), expanded(module, *given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("settings", [dict(use_dora=True), dict(lora_bias=True)])
def test_variants_of_lora_on_the_absorbed_projection_are_refused(settings):
    base = tiny_model("deepseek_v3", adapter=False)
    if "lora_bias" in settings:
        pytest.importorskip("peft")
        for layer in base.model.layers:
            layer.self_attn.kv_b_proj = nn.Linear(16, layer.self_attn.kv_b_proj.out_features, bias=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["kv_b_proj"], **settings))
    with pytest.raises(UnsupportedError, match="kv_b_proj"):
        Engine(model)


class ScaledLinear(nn.Linear):
    """A linear layer whose effect is more than its weight, as quantized ones are."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_an_absorbed_projection_whose_effect_is_more_than_its_weight_is_refused(with_adapter):
    model = tiny_model("deepseek_v3", adapter=False)
    last = model.model.layers[-1].self_attn
    last.kv_b_proj = ScaledLinear(last.kv_b_proj.in_features, last.kv_b_proj.out_features, bias=False)
    if with_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["kv_b_proj"]))
    with pytest.raises(UnsupportedError, match="kv_b_proj is a ScaledLinear"):
        Engine(model)


def test_a_merged_adapter_is_refused():
    model = tiny_model("deepseek_v3")
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="unmerge_adapter"):
        Engine(model)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_the_model_is_as_before_after_the_engine_drove_it(name):
    model = tiny_model(name)
    ids = torch.arange(3, 40)[None]
    before = model(ids, use_cache=False).logits
    with Decoder(model).driven():
        assert all("forward" in layer.self_attn.__dict__ for layer in model.get_base_model().model.layers)
    assert not any("forward" in layer.self_attn.__dict__ for layer in model.get_base_model().model.layers)
    torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=0, atol=0)
