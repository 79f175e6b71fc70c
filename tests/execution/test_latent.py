"""Latent families: exact through absorbed attention, sparse selection, IndexShare and experts; selections are the stock
model's own."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longstraw.errors import UnsupportedError
from longstraw.evidence.memory import MemoryTracker
from longstraw.execution import seams
from longstraw.execution.engine import Engine
from longstraw.models.adapters import LoraSettings, with_adapter
from longstraw.parallel.topology import Topology
from longstraw.records import Prompt, Response, ResponseGroup
from tiny import full_gradients, gradients, random_ids, tiny_model, worst_error

TOPK = 16  # of the tiny models
NAMES = ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
RESPONSES = [random_ids(length, length) for length in (3, 1, 20)]


def mean_nll(logprobs):
    return -sum(part.mean() for part in logprobs)


def engine_gradients(model, prompt, *, responses=RESPONSES, **settings):
    group = ResponseGroup(Prompt(prompt), [Response(ids) for ids in responses])
    Engine(model, **settings).forward_backward([group], mean_nll)
    return gradients(model)


def assert_exact(model, oracle, prompt, *, responses=RESPONSES, **settings):
    want = full_gradients(oracle, prompt, responses, mean_nll)
    got = engine_gradients(model, prompt, responses=responses, **settings)
    assert set(got) >= set(want)
    error, tensor = worst_error(got, want)
    assert error <= 5e-5, f"{tensor}: relative error {error:.1e}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("num_prompt_tokens", [5, TOPK - 1, TOPK, TOPK + 1, 45])
def test_gradient_is_exact_below_and_above_the_selection_size(name, chunk_tokens, num_prompt_tokens):
    """Prompt of 5: responses of 3 never select, one of 20 begins densely and selects from its 12th token on."""
    prompt = random_ids(num_prompt_tokens, 1)
    assert_exact(tiny_model(name), tiny_model(name), prompt, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_exact_with_chunks_of_one_token(name):
    responses = [random_ids(2, 2), random_ids(4, 4)]
    assert_exact(tiny_model(name), tiny_model(name), random_ids(TOPK + 2, 1), responses=responses, chunk_tokens=1)


def gradients_on_ranks(world, name, prompt, responses, chunk_tokens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what pyproject.toml excepts is not known to the ranks
        model = tiny_model(name, num_hidden_layers=2)
    engine = Engine(model, chunk_tokens=chunk_tokens, topology=Topology.create(context=world.degree))
    report = engine.forward_backward([ResponseGroup(Prompt(prompt), [Response(ids) for ids in responses])], mean_nll)
    engine.optimizer_step(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))  # sums
    return gradients(model), dict(report.bytes_sent)


def assert_exact_on_two_ranks(ranks, name, prompt, responses, chunk_tokens):
    """Returns the bytes that each rank sent, by kind."""
    want = full_gradients(tiny_model(name, num_hidden_layers=2), prompt, responses, mean_nll)
    results = ranks(2).run(gradients_on_ranks, name, prompt, responses, chunk_tokens)
    for got, _ in results:
        error, tensor = worst_error(got, want)
        assert error <= 5e-5, f"{tensor}: relative error {error:.1e}"
    return [sent for _, sent in results]


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_gradient_is_exact_where_a_chunk_divided_over_ranks_begins_densely_and_then_selects(ranks, name):
    """The chunk of tokens 14 to 20 attends densely up to its second token; later chunks send it cotangents."""
    assert_exact_on_two_ranks(ranks, name, random_ids(24, 1), RESPONSES, 7)


def test_gradient_is_exact_where_a_rank_without_rows_of_the_prompt_is_sent_queries(ranks):
    for sent in assert_exact_on_two_ranks(ranks, "deepseek_v3", random_ids(1, 1), [random_ids(45, 2)], 4):
        assert sent["queries"] > 0


@pytest.mark.parametrize("pattern", ["FFFF", "FSSF", "FSFS", "FSSS"])
@pytest.mark.parametrize("graph_scope", ["layer", "chunk"])
def test_gradient_is_exact_for_every_index_share_pattern(pattern, graph_scope):
    types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    models = [tiny_model("glm_moe_dsa", indexer_types=types) for _ in range(2)]
    assert_exact(*models, random_ids(45, 1), chunk_tokens=16, graph_scope=graph_scope)


def test_queries_may_come_without_a_low_rank():
    models = [tiny_model("deepseek_v3", q_lora_rank=None) for _ in range(2)]
    assert_exact(*models, random_ids(29, 1), chunk_tokens=8)


def test_rotary_halves_are_supported_where_the_config_asks_for_them():
    models = [tiny_model("deepseek_v3", rope_interleave=False) for _ in range(2)]
    assert_exact(*models, random_ids(29, 1), chunk_tokens=8)


def test_rotary_halves_are_not_taken_for_families_that_have_none():
    models = [tiny_model("deepseek_v32", rope_interleave=False, num_hidden_layers=2) for _ in range(2)]
    assert_exact(*models, random_ids(9, 1), responses=RESPONSES[:1], chunk_tokens=8)


def test_yarn_scales_rotary_and_softmax_as_the_stock_model_does():
    yarn = dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=128,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    models = [tiny_model("deepseek_v32", rope_parameters=yarn) for _ in range(2)]
    assert_exact(*models, random_ids(29, 1), chunk_tokens=8)


def experts_adapted(seed=3, **settings):
    base = tiny_model("glm_moe_dsa", adapter=False, **settings)
    torch.manual_seed(seed)
    model = with_adapter(
        base,
        LoraSettings(
            r=4,
            target_modules=["q_b_proj", "kv_b_proj", "shared_experts.down_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_experts_train_with_and_without_tokens():
    """Of 32 experts that take one token each, some see none of the 48 tokens and some a single one."""
    settings = dict(n_routed_experts=32, num_experts_per_tok=1)
    model = experts_adapted(**settings)
    trained = {name.rpartition(".lora_")[0].partition("layers.1.")[2] for name in gradient_names(model)}
    assert {"mlp.shared_experts.down_proj", "mlp.experts", "mlp.experts.base_layer"} <= trained
    assert_exact(model, experts_adapted(**settings), random_ids(45, 1), chunk_tokens=7)
    loads = expert_loads(experts_adapted(**settings), torch.cat([random_ids(45, 1), RESPONSES[0]]))
    assert min(loads) == 0 and max(loads) > 0


def gradient_names(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def routers(model):
    base = model.get_base_model()
    return [layer.mlp.gate for layer in base.model.layers if hasattr(layer.mlp, "gate")]


def expert_loads(model, ids):
    """Tokens of each expert of the first routed layer."""
    gate, chosen = routers(model)[0], []
    handle = gate.register_forward_hook(lambda _, args, out: chosen.append(out[2]))
    with torch.no_grad():
        model(ids[None], use_cache=False)
    handle.remove()
    return torch.bincount(chosen[0].flatten(), minlength=gate.num_experts).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_group_limited_routing_with_a_correction_bias_is_the_stock_one(name):
    settings = dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2)
    models = [tiny_model(name, **settings) for _ in range(2)]
    assert all(bool(gate.e_score_correction_bias.any()) for gate in routers(models[0]))
    before = [gate.e_score_correction_bias.clone() for gate in routers(models[0])]
    assert_exact(*models, random_ids(29, 1), chunk_tokens=8)
    for gate, bias in zip(routers(models[0]), before, strict=True):
        torch.testing.assert_close(gate.e_score_correction_bias, bias, rtol=0, atol=0)


def test_replay_routes_and_selects_as_capture_did(monkeypatch):
    """Every chunk runs three times: captured, forwarded again, and pulled. Each expert choice must occur thrice."""
    model = tiny_model("glm_moe_dsa")
    routed, selected = [], []
    for layer, gate in enumerate(routers(model)):
        gate.register_forward_hook(lambda _, args, out, layer=layer: routed.append((layer, out[2].tolist())))
    select = seams.select_positions

    def recorded(queries, runs, *, topk):
        selected.append(select(queries, runs, topk=topk))
        return selected[-1]

    monkeypatch.setattr(seams, "select_positions", recorded)
    prompt = Prompt(random_ids(64, 1))
    engine = Engine(model, chunk_tokens=32)
    with engine.capture(prompt) as state:
        captured, num_captured = list(routed), len(selected)
        routed.clear()
        group = ResponseGroup(prompt, [Response(random_ids(2, 2))])
        engine.forward_backward([group], mean_nll, states=[state])
    assert len(captured) == 2 * len(routers(model))
    for choice in captured:
        assert routed.count(choice) == 2, "forwarded again and pulled, with the same routing"
    again = selected[num_captured:]
    assert num_captured == 4, "two chunks, two layers with an indexer"
    for choice in selected[:num_captured]:
        assert sum(torch.equal(choice, other) for other in again) == 1, "selected once in replay, and the same"


@pytest.mark.parametrize("settings", [{}, {"index_head_dim": 28}], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_selected_sets_equal_those_of_the_stock_model(name, settings, monkeypatch):
    """Also where the indexer's parts with and without rotation differ in width."""
    ids, model = random_ids(61, 1), tiny_model(name, **settings)
    stock = []
    indexers = [m for n, m in model.named_modules() if n.endswith("indexer")]
    handles = [indexer.register_forward_hook(lambda _, args, out: stock.append(out[0])) for indexer in indexers]
    with torch.no_grad():
        model(ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    ours = {}
    select = seams.select_positions

    def recorded(queries, runs, *, topk):
        got = select(queries, runs, topk=topk)
        for row, positions in enumerate(got.tolist()):
            ours.setdefault(queries.start + row, []).append(set(positions))
        return got

    monkeypatch.setattr(seams, "select_positions", recorded)
    engine = Engine(model, chunk_tokens=7)
    with engine.capture(Prompt(ids)):
        pass
    assert sorted(ours) == list(range(TOPK, len(ids)))
    for position, sets in ours.items():
        want = [set(layer[position].tolist()) for layer in stock]
        assert sets == want, f"position {position}"


@pytest.mark.parametrize("name", NAMES)
def test_state_takes_the_bytes_of_the_formula(name):
    """At the published widths: 576 numbers a token a layer, and 128 in a layer with an indexer, in bf16."""
    widths = dict(kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=4096)
    indexer = {} if name == "deepseek_v3" else dict(index_head_dim=128)
    model = tiny_model(name, dtype=torch.bfloat16, **widths, **indexer)
    num_layers, num_indexers = 4, {"deepseek_v3": 0, "deepseek_v32": 4, "glm_moe_dsa": 2}[name]
    engine = Engine(model, chunk_tokens=256, prompt_gradient="stopped")
    with MemoryTracker() as tracker, engine.capture(Prompt(random_ids(1000, 1))) as state:
        formula = 1000 * (2 * 576 * num_layers + 2 * 128 * num_indexers)
        assert state.num_bytes == pytest.approx(formula, rel=0.01)
        assert tracker.live_bytes <= 1.02 * formula


def test_adapters_on_the_indexer_act_on_the_selection_but_get_no_gradient():
    def model():
        torch.manual_seed(3)
        lora = LoraConfig(r=4, target_modules=["wq_b", "wk", "weights_proj", "o_proj"], init_lora_weights=False)
        return get_peft_model(tiny_model("glm_moe_dsa", adapter=False), lora).eval()

    prompt = random_ids(45, 1)
    want = full_gradients(model(), prompt, RESPONSES, mean_nll)
    trained = model()
    with pytest.warns(UserWarning, match="indexer") as caught:
        engine = Engine(trained, chunk_tokens=16)
    assert len(caught) == 1 and "wq_b" in str(caught[0].message)
    engine.forward_backward([ResponseGroup(Prompt(prompt), [Response(ids) for ids in RESPONSES])], mean_nll)
    got = gradients(trained)
    assert got and not any("indexer" in name for name in got)
    assert worst_error(got, want)[0] <= 5e-5
    plain = full_gradients(without_indexer_adapters(trained), prompt, RESPONSES, mean_nll)
    assert worst_error(plain, want)[0] > 1e-2, "the selection must have changed, or this test sees nothing"


def without_indexer_adapters(model):
    for name, parameter in model.named_parameters():
        if "indexer" in name and "lora_B" in name:
            parameter.data.zero_()
    return model


def test_adapters_on_the_indexer_alone_would_train_nothing():
    lora = LoraConfig(r=4, target_modules=["wq_b"], init_lora_weights=False)
    model = get_peft_model(tiny_model("deepseek_v32", adapter=False), lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedError, match="nothing would train"):
            Engine(model)


@pytest.mark.parametrize(("types", "words"), [(["shared"] * 4, "begins with 'shared'"), (["odd"] * 4, "odd")])
def test_index_share_patterns_without_a_meaning_are_refused(types, words):
    model = tiny_model("glm_moe_dsa")
    model.get_base_model().config.indexer_types = types
    with pytest.raises(UnsupportedError, match=words):
        Engine(model)
