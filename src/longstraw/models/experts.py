"""Routed experts divided over ranks: which parameters that concerns, which part a rank keeps, and the whole again.

Apart from `parallel/expert.py` because this is about weights and adapters of stock modules, not about tokens. An
experts module is one that transformers' experts registry decorates: all its own parameters have the experts in front.
peft's adapter of such a parameter keeps all experts' factors in two matrices, A `[experts * r, in]` and B
`[out, r * experts]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

from longstraw.errors import UnsupportedError

Layout = Literal["front", "interleaved"]  # dim 0 counts experts (times a rank r); the last dim counts r, then experts
DispatchedForward = Callable[["DividedExperts", Tensor, Tensor, Tensor], Tensor]


class ExpertsModule(nn.Module):
    """What is used of a stock experts module; for type checkers."""

    num_experts: int
    is_transposed: bool
    forward: Callable[..., Tensor]


class ExpertAxis(Protocol):
    """An axis of a topology: how many ranks divide the experts, and which this one is."""

    @property
    def degree(self) -> int: ...

    @property
    def rank(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """Which of a layer's experts: the `rank`-th of `degree` equal ranges."""

    degree: int
    rank: int

    @classmethod
    def of_axis(cls, axis: ExpertAxis, model: nn.Module) -> Part:
        """The part of an axis' rank. Raises `UnsupportedError` if the model's experts do not divide so."""
        sizes = num_routed_experts(model)
        if axis.degree > 1 and not sizes:
            raise UnsupportedError(
                f"expert={axis.degree}, but the model has no routed experts to divide; set expert to 1."
            )
        for num_experts in sorted(sizes):
            if num_experts % axis.degree:
                raise UnsupportedError(
                    f"expert={axis.degree} does not divide the model's {num_experts} routed experts; set expert to a "
                    "divisor of that number."
                )
        return cls(axis.degree, axis.rank)

    def range(self, num_experts: int) -> tuple[int, int]:
        """The first expert of so many, and the one after the last."""
        each = num_experts // self.degree
        return self.rank * each, (self.rank + 1) * each

    def of(self, whole: Tensor, layout: Layout, num_experts: int) -> Tensor:
        """The part of a tensor that all experts share, as a copy (so that the rest can be freed)."""
        begin, end = self.range(num_experts)
        if layout == "front":
            each = whole.shape[0] // num_experts
            return whole[begin * each : end * each].clone()
        return whole.unflatten(-1, (-1, num_experts))[..., begin:end].flatten(-2).clone()


def joined(parts: Sequence[Tensor], layout: Layout, num_local_experts: int) -> Tensor:
    """The inverse of `Part.of`, from the parts in rank order."""
    if layout == "front":
        return torch.cat(list(parts))
    return torch.cat([part.unflatten(-1, (-1, num_local_experts)) for part in parts], -1).flatten(-2)


@dataclass(eq=False)
class DividedExperts:
    """The forward of an experts module that has a part of its layer's experts. All ranks of the axis call it alike."""

    module: ExpertsModule
    part: Part
    num_experts: int  # of the whole layer
    dispatch: DispatchedForward | None = None  # how tokens get to the others' experts; an engine's

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.part.degree

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The stock signature; `top_k_index` counts the experts of the whole layer."""
        if self.dispatch is None:
            raise UnsupportedError(
                f"this model has {self.num_local_experts} of a layer's {self.num_experts} experts; give it to an "
                "Engine with the topology it was loaded with before calling it."
            )
        return self.dispatch(self, hidden_states, top_k_index, top_k_weights)

    def run_local(self, hidden_CE: Tensor, expert_C1: Tensor, weight_C1: Tensor) -> Tensor:
        """The stock forward on this rank's experts, counted from its first."""
        return type(self.module).forward(self.module, hidden_CE, expert_C1, weight_C1)


def experts_modules(model: nn.Module) -> dict[str, ExpertsModule]:
    """The modules that hold a layer's routed experts, by name."""
    found = {name: module for name, module in model.named_modules() if "_is_expert_parallel" in vars(module)}
    return cast("dict[str, ExpertsModule]", found)


def divided_experts(model: nn.Module) -> list[DividedExperts]:
    """The forwards of experts modules that were divided."""
    forwards = [vars(module).get("forward") for module in experts_modules(model).values()]
    return [forward for forward in forwards if isinstance(forward, DividedExperts)]


def num_routed_experts(model: nn.Module) -> set[int]:
    """Experts of each layer that has some; of the whole layer also where they are divided."""
    divided = {forward.module: forward.num_experts for forward in divided_experts(model)}
    return {divided.get(module, module.num_experts) for module in experts_modules(model).values()}


def expert_parameters(model: nn.Module) -> dict[str, tuple[Layout, int]]:
    """Parameters that belong to single experts, adapters on them too: how they are laid out, and experts held here."""
    found: dict[str, tuple[Layout, int]] = {}
    for name, module in experts_modules(model).items():
        for own, _ in module.named_parameters(recurse=False):
            found[f"{name}.{own}"] = "front", module.num_experts
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and _wraps_experts(module):
            for own, _ in module.lora_A.named_parameters():
                found[f"{name}.lora_A.{own}"] = "front", module.num_experts
            for own, _ in module.lora_B.named_parameters():
                found[f"{name}.lora_B.{own}"] = "interleaved", module.num_experts
    return found


@torch.no_grad()
def divide_experts(model: nn.Module, part: Part) -> None:
    """Keep this part of every layer's routed experts and of adapters on them, in place; the others' memory is freed.

    Parameters stay the same objects with smaller data, so an optimizer made before goes on. Until an engine connects
    the parts the model cannot run. Raises `UnsupportedError`,
    before anything is changed, for experts or adapters that cannot be divided.
    """
    parameters = dict(model.named_parameters())
    for name, (layout, num_experts) in expert_parameters(model).items():
        _check(name, parameters[name], layout, num_experts)
    wrappers = _adapters_on_experts(model)
    for wrapper in wrappers:
        _check_adapter(wrapper, part)
    for wrapper in wrappers:
        _divide_adapter(wrapper, part)
    for module in experts_modules(model).values():
        num_experts = module.num_experts
        for parameter in module.parameters(recurse=False):
            _divide_parameter(parameter, part, "front", num_experts)
        module.num_experts = num_experts // part.degree
        module.forward = DividedExperts(module, part, num_experts)


@contextmanager
def as_if_whole(model: nn.Module) -> Iterator[None]:
    """Within it divided experts have the shapes of all experts, without the memory, so that peft can fit an adapter.

    The adapter is drawn whole, as without division, and divided on exit; other ranks draw the same and keep theirs.
    """
    divided = divided_experts(model)
    held = [(p, p.data) for forward in divided for p in forward.module.parameters(recurse=False)]
    for forward in divided:
        for parameter in forward.module.parameters(recurse=False):
            whole = (forward.num_experts, *parameter.shape[1:])
            parameter.data = parameter.data.new_zeros(1).expand(whole)
        forward.module.num_experts = forward.num_experts
    try:
        yield
    finally:
        for parameter, data in held:
            parameter.data = data
        for forward in divided:
            forward.module.num_experts = forward.num_local_experts
    for forward in divided[:1]:  # all layers are divided alike
        for wrapper in _adapters_on_experts(model):
            _divide_adapter(wrapper, forward.part)


def _adapters_on_experts(model: nn.Module) -> list[ParamWrapper]:
    return [module for module in model.modules() if isinstance(module, ParamWrapper) and _wraps_experts(module)]


@torch.no_grad()
def _divide_adapter(wrapper: ParamWrapper, part: Part) -> None:
    for parameter in wrapper.lora_A.parameters():
        _divide_parameter(parameter, part, "front", wrapper.num_experts)
    for parameter in wrapper.lora_B.parameters():
        _divide_parameter(parameter, part, "interleaved", wrapper.num_experts)
    wrapper.num_experts //= part.degree


def _divide_parameter(parameter: nn.Parameter, part: Part, layout: Layout, num_experts: int) -> None:
    parameter.data = part.of(parameter.data, layout, num_experts)
    parameter.grad = None


def _wraps_experts(wrapper: ParamWrapper) -> bool:
    return "_is_expert_parallel" in vars(wrapper.get_base_layer())


def _check(name: str, parameter: Tensor, layout: Layout, num_experts: int) -> None:
    size = parameter.shape[0 if layout == "front" else -1] if parameter.dim() > 0 else 0
    if size == 0 or size % num_experts:
        raise UnsupportedError(
            f"{name} of shape {tuple(parameter.shape)} does not have its {num_experts} experts side by side, so it "
            "cannot be divided; set expert to 1, or load the model without quantization."
        )


def _check_adapter(wrapper: ParamWrapper, part: Part) -> None:
    name, base = wrapper.parameter_name, wrapper.get_base_layer()
    if wrapper.num_experts != base.num_experts:
        raise UnsupportedError(
            f"an adapter on {name}, which has one row for each expert, cannot be divided; take it out of "
            "target_parameters or set expert to 1."
        )
    if wrapper.num_experts == part.degree and base.is_transposed:
        raise UnsupportedError(
            f"an adapter on {name} needs at least two experts on a rank (peft 0.21 turns a single transposed one "
            f"round); set expert below {part.degree}."
        )
