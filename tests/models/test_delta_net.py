"""The replaced DeltaNet forward equals the stock module of each family, whole or cut into chunks."""

import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from longstraw.errors import UnsupportedError
from longstraw.models.delta_net import RecurrentCache, delta_net_forward, replaced_delta_nets
from longstraw.ops.delta_rule import gated_delta_rule_naive
from tiny import tiny_model

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
CUTS = (1, 2, 64, 1, 5, 70)  # odd places, chunks shorter than the convolution, single tokens


def stock_net(family, dtype=torch.float32, *, adapter=False):
    model = tiny_model(family, adapter=False, num_hidden_layers=1, layer_types=["linear_attention"])
    net = model.model.layers[0].linear_attn
    nn.init.normal_(net.dt_bias)
    nn.init.normal_(net.norm.weight, mean=1.0, std=0.3)
    if adapter:
        targets = [name for name, child in net.named_modules() if isinstance(child, nn.Linear)]
        net = inject_adapter_in_model(LoraConfig(r=3, target_modules=targets, init_lora_weights=False), net)
    return net.to(dtype).eval()


def hidden_states(num_tokens, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(batch, num_tokens, 32, generator=generator).to(dtype).requires_grad_()


def in_chunks(net, hidden, sizes=CUTS):
    outs, cache = [], RecurrentCache(None, None)
    for piece in hidden.split(sizes, 1):
        cache = RecurrentCache(cache.new_conv_tail, cache.new_matrix_state)
        outs.append(net(hidden_states=piece, cache=cache, attention_mask=None, chunk=None))
    return torch.cat(outs, 1)


def gradients(net, hidden, out):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    leaves = {"hidden": hidden, **{name: p for name, p in net.named_parameters() if p.requires_grad}}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights), strict=True))


def errors(got, want):
    pairs = {name: (got[name].detach().double(), want[name].detach().double()) for name in want}
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def assert_equal(got, want, tolerance):
    worst = {name: f"{error:.1e}" for name, error in errors(got, want).items() if not error <= tolerance}
    assert not worst


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradients_equal_the_stock_module_however_the_sequence_is_cut(family, adapter):
    net, hidden = stock_net(family, adapter=adapter), hidden_states(sum(CUTS))
    want_out = net(hidden)
    want = gradients(net, hidden, want_out)
    assert len(want) > 6
    with replaced_delta_nets([net]):
        for out in (net(hidden), in_chunks(net, hidden)):
            assert_equal({"out": out}, {"out": want_out}, 1e-5)
            # The stock recurrence sums log decays in float32, which costs it up to 1e-4 where decays are strong;
            # without it the next test shows equality to rounding.
            assert_equal(gradients(net, hidden, out), want, 1e-4)


class Float64Norm(nn.Module):
    """The stock gated norm without its cast to float32."""

    def __init__(self, stock):
        super().__init__()
        self.weight, self.epsilon = stock.weight, stock.variance_epsilon

    def forward(self, x, gate):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * nn.functional.silu(gate)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_they_are_equal_to_rounding(family, monkeypatch):
    """The stock module with its casts to float32 lifted and the oracle as its recurrence."""
    net, hidden = stock_net(family, torch.float64), hidden_states(sum(CUTS), torch.float64)
    net.norm = Float64Norm(net.norm)

    def oracle(q, k, v, *, g, beta, initial_state, **_):
        return gated_delta_rule_naive(q, k, v_BTHV=v, log_decay_BTH=g, beta_BTH=beta, initial_state_BHKV=initial_state)

    to_float32 = torch.Tensor.float
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x))
        patch.setattr(sys.modules[type(net).__module__], "torch_chunk_gated_delta_rule", oracle)
        want_out = net(hidden)
    want = gradients(net, hidden, want_out)
    with replaced_delta_nets([net]):
        out = in_chunks(net, hidden)
    assert_equal({"out": out}, {"out": want_out}, 1e-11)
    assert_equal(gradients(net, hidden, out), want, 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_further_from_float32_than_the_stock_module(family):
    exact_net, net = stock_net(family), stock_net(family, torch.bfloat16)
    net.load_state_dict(exact_net.state_dict())
    exact_net.load_state_dict(net.state_dict())  # the same rounded weights
    hidden = hidden_states(130, torch.bfloat16)
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_out, stock_out = exact_net(exact_hidden), net(hidden)
    exact, stock = gradients(exact_net, exact_hidden, exact_out), gradients(net, hidden, stock_out)
    with replaced_delta_nets([net]):
        out = net(hidden)
    assert out.dtype == torch.bfloat16
    got = gradients(net, hidden, out)
    assert all(got[name].dtype == stock[name].dtype for name in stock)
    got_errors, stock_errors = errors(got, exact), errors(stock, exact)
    assert sum(got_errors.values()) <= 1.1 * sum(stock_errors.values())
    assert (
        errors({"out": out}, {"out": exact_out})["out"] <= 1.1 * errors({"out": stock_out}, {"out": exact_out})["out"]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_decodes_from_a_shared_state_as_its_chunks_do(family):
    net, prompt, responses = stock_net(family), hidden_states(11), hidden_states(6, batch=3)
    with torch.no_grad(), replaced_delta_nets([net]):
        end = RecurrentCache(None, None)
        net(prompt, cache=end)
        shared = [x.expand(3, *x.shape[1:]) for x in (end.new_conv_tail, end.new_matrix_state)]
        want = net(responses, cache=RecurrentCache(*shared))
        cache = RecurrentCache(None, None, *shared)
        for t in range(6):
            cache = RecurrentCache(cache.new_conv_tail, cache.new_matrix_state)
            out = net(responses[:, t : t + 1], cache=cache)
            torch.testing.assert_close(out[:, 0], want[:, t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_gradients_reach_the_boundary_from_the_output_and_from_the_next_boundary(num_tokens):
    net, before, after = stock_net("qwen3_5_text"), hidden_states(9), hidden_states(num_tokens)
    with replaced_delta_nets([net]):
        whole = RecurrentCache(None, None)
        out = net(torch.cat([before, after], 1), cache=whole)[:, 9:]
        ends = [out, whole.new_conv_tail, whole.new_matrix_state]
        want = torch.autograd.grad(ends, before, [torch.ones_like(x) for x in ends])[0]
        first = RecurrentCache(None, None)
        net(before, cache=first)
        leaves = [x.detach().requires_grad_() for x in (first.new_conv_tail, first.new_matrix_state)]
        second = RecurrentCache(*leaves)
        ends = [net(after, cache=second), second.new_conv_tail, second.new_matrix_state]
        cotangents = torch.autograd.grad(ends, leaves, [torch.ones_like(x) for x in ends])
        got = torch.autograd.grad([first.new_conv_tail, first.new_matrix_state], before, cotangents)[0]
    assert_equal({"before": got}, {"before": want}, 1e-5)


def test_the_stock_forward_is_back_after_the_context_even_after_an_error():
    nets = [stock_net("qwen3_next"), stock_net("qwen3_5_text")]
    own = nets[1].forward = lambda *_, **__: "own"

    def fail_inside():
        with replaced_delta_nets(nets):
            assert all(net(hidden_states(3), cache=RecurrentCache(None, None)).shape == (1, 3, 32) for net in nets)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert "forward" not in nets[0].__dict__
    assert nets[1].forward is own


def test_what_it_cannot_do_is_refused_by_name():
    net, other, hidden = stock_net("qwen3_5_text"), nn.Linear(2, 2), hidden_states(3)
    with pytest.raises(UnsupportedError, match="Linear is not a supported gated"), replaced_delta_nets([net, other]):
        pass
    assert "forward" not in net.__dict__
    with pytest.raises(UnsupportedError, match="supported are Qwen3NextGatedDeltaNet"):
        delta_net_forward(other, hidden, cache=None)
    with replaced_delta_nets([net]):
        with pytest.raises(UnsupportedError, match="no mask"):
            net(hidden, attention_mask=torch.ones(1, 3))
        with pytest.raises(UnsupportedError, match="must be a RecurrentCache, got dict"):
            net(hidden, cache={})
