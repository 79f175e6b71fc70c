"""The chunked delta rule equals the token-by-token oracle and the stock code: values, every gradient, any length."""

import functools

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from longstraw.errors import InputError
from longstraw.ops.delta_rule import gated_delta_rule, gated_delta_rule_naive

LENGTHS = [1, 7, 63, 64, 65, 130, 1000]
NAMES = ("out", "final", "d_q", "d_k", "d_v", "d_log_decay", "d_beta", "d_initial_state")


def inputs(num_tokens, dtype=torch.float64, *, batch=2, key_heads=2, value_heads=4, decay=1.0, seed=0):
    """The six arguments as leaves; key width 12, value width 20."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    arguments = [
        draw(batch, num_tokens, key_heads, 12),
        draw(batch, num_tokens, key_heads, 12),
        draw(batch, num_tokens, value_heads, 20),
        -decay * torch.nn.functional.softplus(2 * draw(batch, num_tokens, value_heads)),
        draw(batch, num_tokens, value_heads).sigmoid(),
        0.3 * draw(batch, value_heads, 12, 20),
    ]
    return [x.to(dtype).requires_grad_() for x in arguments]


def call(rule, arguments):
    q, k, v, log_decay, beta, state = arguments
    return rule(q, k, v_BTHV=v, log_decay_BTH=log_decay, beta_BTH=beta, initial_state_BHKV=state)


def results(rule, arguments, seed=1):
    """Outputs, final state, and the gradients of a random function of both."""
    outs = call(rule, arguments)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outs]
    leaves = [x for x in arguments if x is not None]
    gradients = torch.autograd.grad(outs, leaves, weights)
    return dict(zip(NAMES, [*(x.detach() for x in outs), *gradients], strict=False))


def as_float64(arguments):
    return [None if x is None else x.detach().double().requires_grad_() for x in arguments]


def assert_equal(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.shape == want[name].shape
        scale = want[name].double().norm() + 1e-17  # some are zero or nearly so
        error = (x.double() - want[name].double()).norm() / scale
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def stock(q, k, *, v_BTHV, log_decay_BTH, beta_BTH, initial_state_BHKV):
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(
        q,
        k,
        v_BTHV,
        g=log_decay_BTH,
        beta=beta_BTH,
        initial_state=initial_state_BHKV,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


@functools.cache
def oracle(num_tokens):
    """Arguments that float32 holds exactly, and what the oracle makes of them in float64."""
    arguments = as_float64(inputs(num_tokens, torch.float32, batch=1 if num_tokens > 500 else 2))
    return arguments, results(gated_delta_rule_naive, arguments)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_values_and_gradients_equal_the_oracle_in_float64(num_tokens):
    arguments, want = oracle(num_tokens)
    assert_equal(results(gated_delta_rule, arguments), want, 1e-12)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_float32_is_within_rounding_of_the_float64_oracle(num_tokens):
    arguments, want = oracle(num_tokens)
    got = results(gated_delta_rule, [x.detach().float().requires_grad_() for x in arguments])
    assert_equal(got, want, 1e-6)


@pytest.mark.parametrize("decay", [0.02, 20.0, 100.0])
def test_weak_and_strong_decays_cost_no_accuracy(decay):
    arguments = inputs(130, torch.float32, decay=decay)
    assert_equal(results(gated_delta_rule, arguments), results(gated_delta_rule_naive, as_float64(arguments)), 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_values_and_gradients_equal_the_stock_code(num_tokens):
    arguments = inputs(num_tokens, torch.float32)
    # The stock sums of log decays are float32: errors of 1e-6 here, of 1e-5 where decays are strong.
    assert_equal(results(gated_delta_rule, arguments), results(stock, arguments), 1e-5)


@pytest.mark.parametrize("num_tokens", [1, 65])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (3, 3), (1, 3), (2, 6)])
def test_every_grouping_of_heads_equals_the_oracle(num_tokens, key_heads, value_heads):
    arguments = inputs(num_tokens, key_heads=key_heads, value_heads=value_heads, batch=3)
    assert_equal(results(gated_delta_rule, arguments), results(gated_delta_rule_naive, arguments), 1e-12)


@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_no_initial_state_is_a_zero_state(num_tokens):
    arguments = inputs(num_tokens)
    got, want = (
        results(gated_delta_rule, [*arguments[:5], None]),
        results(gated_delta_rule_naive, [*arguments[:5], None]),
    )
    assert_equal(got, want, 1e-12)
    zero = torch.zeros_like(arguments[5]).requires_grad_()
    want = results(gated_delta_rule, [*arguments[:5], zero])
    assert_equal(got, {name: want[name] for name in got}, 1e-14)


def test_cutting_a_sequence_anywhere_changes_nothing():
    arguments = inputs(200)
    whole = results(gated_delta_rule, arguments)

    def in_pieces(q, k, *, v_BTHV, log_decay_BTH, beta_BTH, initial_state_BHKV):
        outs, state, start = [], initial_state_BHKV, 0
        for size in (1, 2, 64, 1, 70, 62):
            piece = [x[:, start : start + size] for x in (q, k, v_BTHV, log_decay_BTH, beta_BTH)]
            out, state = call(gated_delta_rule, [*piece, state])
            outs.append(out)
            start += size
        return torch.cat(outs, 1), state

    assert_equal(results(in_pieces, arguments), whole, 1e-12)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_the_outputs_or_of_the_final_state_alone(which):
    arguments = inputs(70)
    got = torch.autograd.grad(call(gated_delta_rule, arguments)[which].square().sum(), arguments, allow_unused=True)
    want = torch.autograd.grad(
        call(gated_delta_rule_naive, arguments)[which].square().sum(), arguments, allow_unused=True
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-10, atol=1e-12)


def test_equal_keys_and_extreme_betas_stay_exact():
    arguments = inputs(130, torch.float32)
    with torch.no_grad():
        arguments[1][:] = arguments[1][:, :1]  # the worst conditioned triangular system: all ones
        arguments[3].zero_()
        arguments[4][:, ::3], arguments[4][:, 1::3] = 0, 1
    assert_equal(results(gated_delta_rule, arguments), results(gated_delta_rule_naive, as_float64(arguments)), 2e-6)


def test_huge_decays_give_finite_gradients():
    arguments = inputs(130, torch.float32)
    with torch.no_grad():
        arguments[3][:, ::5] = -1e4
    got = results(gated_delta_rule, arguments)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert_equal(got, results(gated_delta_rule_naive, as_float64(arguments)), 1e-6)


def test_bfloat16_arguments_are_computed_in_float32_and_rounded_once():
    arguments = [x.detach().bfloat16().requires_grad_() for x in inputs(130, torch.float32)]
    arguments[3], arguments[5] = (arguments[i].detach().float().requires_grad_() for i in (3, 5))
    got = results(gated_delta_rule, arguments)
    assert got["out"].dtype == got["d_q"].dtype == torch.bfloat16
    assert got["final"].dtype == got["d_initial_state"].dtype == torch.float32
    want = results(gated_delta_rule_naive, as_float64(arguments))
    assert_equal(got, want, 2**-8)
    assert_equal({"final": got["final"]}, {"final": want["final"]}, 1e-6)


def test_without_autograd_the_values_are_the_same():
    arguments = inputs(130)
    with torch.no_grad():
        free = call(gated_delta_rule, arguments)
    for x, y in zip(free, call(gated_delta_rule, arguments), strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad


def test_states_and_their_gradients_own_their_bytes():
    for num_tokens in (1, 7, 130):
        arguments = inputs(num_tokens)
        _, final = call(gated_delta_rule, arguments)
        (gradient,) = torch.autograd.grad(final.sum(), arguments[5:])
        for x in (final, gradient):
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_a_batch_decodes_one_token_at_a_time_as_the_whole_sequences_do():
    arguments = [x.detach() for x in inputs(20, batch=5)]
    want_out, want_state = call(gated_delta_rule, arguments)
    state = arguments[5]
    for t in range(20):
        out, state = call(gated_delta_rule, [*(x[:, t : t + 1] for x in arguments[:5]), state])
        torch.testing.assert_close(out[:, 0], want_out[:, t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, want_state, rtol=1e-10, atol=1e-12)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="3 value heads are not a multiple of 2 key heads"):
        call(gated_delta_rule, inputs(7, key_heads=2, value_heads=3))
