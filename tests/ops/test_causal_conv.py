"""The shifted multiply-adds equal the definition and the framework's depthwise convolution."""

import pytest
import torch

from longstraw.ops import causal_conv as module
from longstraw.ops.causal_conv import causal_conv, causal_conv_naive

CHANNELS = 5


def inputs(num_tokens, dtype=torch.float64, *, taps=4, tail=True, bias=True, batch=2):
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    x = draw(batch, num_tokens, CHANNELS).transpose(1, 2)  # the order the projections give
    return x, draw(CHANNELS, taps), draw(CHANNELS) if bias else None, draw(batch, CHANNELS, taps - 1) if tail else None


def results(conv, arguments):
    x, weight, bias, tail = arguments
    outs = conv(x, weight, bias_C=bias, tail_BCw=tail)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outs]
    gradients = torch.autograd.grad(outs, [y for y in arguments if y is not None], weights)
    return [*outs, *gradients]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 65, 1000])
@pytest.mark.parametrize(("tail", "bias"), [(True, True), (False, False)])
def test_values_and_gradients_equal_the_definition(num_tokens, tail, bias, monkeypatch):
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 20 * CHANNELS)  # several slices
    arguments = inputs(num_tokens, tail=tail, bias=bias)
    for got, want in zip(results(causal_conv, arguments), results(causal_conv_naive, arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 2, 5])
def test_any_width_equals_the_definition(taps):
    arguments = inputs(9, taps=taps)
    for got, want in zip(results(causal_conv, arguments), results(causal_conv_naive, arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_as_the_depthwise_kernel_does(dtype):
    x, weight, _, tail = inputs(65, dtype, bias=False)
    got, new_tail = causal_conv(x, weight, bias_C=None, tail_BCw=tail)
    padded = torch.cat([tail, x], 2)
    want = torch.nn.functional.conv1d(padded, weight[:, None], groups=CHANNELS)
    assert got.dtype == new_tail.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(new_tail, padded[:, :, -3:])


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_tails_and_their_gradients_own_their_bytes(num_tokens):
    x, weight, bias, tail = inputs(num_tokens, torch.float32)
    out, new_tail = causal_conv(x, weight, bias_C=bias, tail_BCw=tail)
    (gradient,) = torch.autograd.grad(out.sum(), [tail])
    for y in (new_tail, gradient):
        assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
