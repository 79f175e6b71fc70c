"""The names that later work and outside code call: few, pinned, and each explained."""

import inspect

import pytest

import longstraw

PUBLIC_NAMES = {
    "GRPO",
    "Engine",
    "ForwardBackwardReport",
    "InputError",
    "LongStrawError",
    "LoraSettings",
    "Prompt",
    "PromptState",
    "Response",
    "ResponseGroup",
    "SamplingSettings",
    "Span",
    "StaleStateError",
    "StepReport",
    "Topology",
    "Trajectory",
    "UnsupportedError",
    "load_model",
    "preset_config",
    "tiny_model",
}


def test_public_surface_is_pinned():
    assert set(longstraw.__all__) == PUBLIC_NAMES
    assert len(longstraw.__all__) == len(set(longstraw.__all__)) <= 20


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_name_has_its_own_docstring(name):
    documentation = getattr(longstraw, name).__doc__
    # A dataclass without a docstring is given its own signature as one.
    assert documentation
    assert not documentation.startswith(f"{name}(")


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_public_methods_are_documented(name):
    public = getattr(longstraw, name)
    if not inspect.isclass(public):
        return
    methods = {key: value for key, value in vars(public).items() if inspect.isfunction(value) and key[0] != "_"}
    assert [key for key, method in methods.items() if not inspect.getdoc(method)] == []


def test_user_mistakes_can_be_caught_as_value_errors():
    assert issubclass(longstraw.InputError, ValueError)
    assert issubclass(longstraw.UnsupportedError, ValueError)
    for name in ("InputError", "UnsupportedError", "StaleStateError"):
        assert issubclass(getattr(longstraw, name), longstraw.LongStrawError)
