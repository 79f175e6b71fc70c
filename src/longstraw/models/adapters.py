"""The low-rank adapter that is trained instead of the weights: its settings, what it may fit, and putting it on.

Apart from loading because models without a checkpoint get the same adapter by the same rules. Two of them are ours: an
indexer of sparse attention chooses positions, and a choice has no gradient, so "all-linear" leaves it out; and it means
linear layers on every model, where peft 0.21 trades some for the fused experts and routers of some models.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import transformers_weight_conversion as peft_conversion
from torch import nn
from transformers import PreTrainedModel

from longstraw.errors import InputError
from longstraw.models.experts import as_if_whole
from longstraw.models.wording import listed, nearest_hint, one_sentence

ALL_LINEAR = "all-linear"
INDEXER = "indexer"  # the module's name in deepseek_v32 and glm_moe_dsa of transformers 5.24
INDEXER_PATTERN = rf".*\.{INDEXER}\..*"


@dataclass(frozen=True)
class LoraSettings:
    """The low-rank adapter that is trained instead of the weights.

    `alpha`: numerator of the scale alpha / r; None is 2 * r. `target_modules` as in peft: "all-linear" (every linear
    layer but the head and the indexers of sparse attention), one regular expression over whole names, or a list of
    names or endings of names. `target_parameters`: names or endings of bare parameters, the fused experts of
    mixture-of-experts models. Raises `InputError` if nothing could be trained.
    """

    r: int = 16
    alpha: float | None = None
    target_modules: str | Sequence[str] = ALL_LINEAR
    target_parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.target_parameters, str):
            raise InputError("adapter: target_parameters must be a list of names, got one text.")
        object.__setattr__(self, "target_parameters", tuple(self.target_parameters))
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.r < 1:
            raise InputError(f"adapter: r must be at least 1, got {self.r}; an adapter of rank 0 would train nothing.")
        if self.alpha is not None and not self.alpha > 0:
            raise InputError(f"adapter: alpha must be positive, got {self.alpha}; the adapter would train nothing.")
        if not self.target_modules and not self.target_parameters:
            raise InputError(
                "adapter: target_modules and target_parameters are empty, the adapter would train nothing; "
                f"target_modules={ALL_LINEAR!r} fits every linear layer but the head."
            )

    @property
    def fits_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR


def linear_layers(model: nn.Module) -> list[str]:
    """Names of all linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def linear_layers_of_indexers(model: nn.Module) -> list[str]:
    """Names of the linear layers that choose positions for sparse attention; no gradient reaches them."""
    return [name for name in linear_layers(model) if is_in_indexer(name)]


def check_targets(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Look an adapter's names up in a model, which may be without memory ("meta" tensors).

    Raises `InputError` for an adapter that fits nothing, or indexers only. Warns the caller's caller of single names
    that fit nothing, as peft drops them without a word, and of the indexers that "all-linear" leaves out.
    """
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    unmatched = _unmatched(settings.target_parameters, parameters)
    num_targets = len(settings.target_modules) + len(settings.target_parameters)
    if isinstance(settings.target_modules, str):
        num_targets = 1 + len(settings.target_parameters)
        pattern = settings.target_modules
        if not settings.fits_all_linear and not any(_fits(pattern, name) for name in modules):
            unmatched.append(pattern)
    else:
        unmatched += _unmatched(settings.target_modules, modules)
    _check_indexers(model, settings, modules, parameters)
    if not unmatched:
        return
    linear = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    if len(unmatched) == num_targets:
        raise InputError(
            f"adapter: {listed(unmatched)} fits no module or parameter of the model, the adapter would train "
            f"nothing; its linear layers are: {listed(linear)}.{_bare_parameters(model)}"
        )
    hint = nearest_hint(unmatched[0], linear)
    warnings.warn(f"adapter: no part of the model is called {listed(unmatched)}{hint}", stacklevel=3)


def with_adapter(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """The model inside a new adapter, which alone requires grad; float32, drawn from torch's generator.

    Raises `InputError`, one sentence, for targets that peft cannot adapt.
    """
    modules = settings.target_modules
    leaves_out = settings.fits_all_linear and bool(linear_layers_of_indexers(model))
    config = LoraConfig(
        r=settings.r,
        lora_alpha=2 * settings.r if settings.alpha is None else settings.alpha,
        target_modules=modules if isinstance(modules, str) else list(modules),
        exclude_modules=INDEXER_PATTERN if leaves_out else None,  # peft warns of a pattern that excludes nothing
        target_parameters=list(settings.target_parameters) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with one_sentence("adapter"), _names_taken_literally(), as_if_whole(model), warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 renamed; nothing a user could do about it.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        adapted = get_peft_model(model, config)
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise InputError("adapter: it fits no part of the model and would train nothing.")
    return adapted


@contextmanager
def _names_taken_literally() -> Iterator[None]:
    """Within it peft adapts what is named.

    For adapters of old checkpoints, peft 0.21 reads every target that ends in gate_proj, up_proj or down_proj of a
    mixture-of-experts model as its fused experts, and "all-linear" as the routers too: shared experts and dense layers,
    whose linear layers have the same names, would be left out and 8.8 billion parameters of GLM-5.2 put in. Routed
    experts are named in `target_parameters`.
    """
    stock = peft_conversion.convert_peft_config_for_transformers
    peft_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        peft_conversion.convert_peft_config_for_transformers = stock


def _check_indexers(
    model: PreTrainedModel, settings: LoraSettings, modules: Sequence[str], parameters: Sequence[str]
) -> None:
    if settings.fits_all_linear:
        left_out = linear_layers_of_indexers(model)
        if left_out:
            warnings.warn(
                f"adapter: {ALL_LINEAR} leaves out the {len(left_out)} linear layers of the indexers, because they "
                "choose the positions that are attended to, and a choice has no gradient to train them with.",
                stacklevel=4,
            )
        return
    targets = settings.target_modules
    if isinstance(targets, str):
        fitted = [name for name in modules if _fits(targets, name)]
    else:
        fitted = [name for name in modules if _any_fits(targets, name)]
    fitted += [name for name in parameters if _any_fits(settings.target_parameters, name)]
    if fitted and all(map(is_in_indexer, fitted)):
        raise InputError(
            f"adapter: {listed(sorted({name.rpartition('.')[2] for name in fitted}))} are parts of indexers only, "
            "which choose positions and get no gradient, so the adapter would train nothing; "
            f"target_modules={ALL_LINEAR!r} fits every linear layer but those and the head."
        )


def is_in_indexer(name: str) -> bool:
    """Whether a module or parameter of that name belongs to an indexer."""
    return INDEXER in name.split(".")


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise InputError(f"adapter: target_modules {pattern!r} is not a regular expression ({error}).") from None


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _any_fits(targets: Sequence[str], name: str) -> bool:
    return any(_ends_with(name, target) for target in targets)


def _unmatched(targets: Sequence[str], names: Sequence[str]) -> list[str]:
    return [target for target in targets if not any(_ends_with(name, target) for name in names)]


def _bare_parameters(model: PreTrainedModel) -> str:
    """A sentence on parameters with three or more dimensions, which `target_parameters` is for, if there are any."""
    fused = sorted({".".join(name.split(".")[-2:]) for name, value in model.named_parameters() if value.dim() >= 3})
    fused = [name for name in fused if not name.endswith(".weight")]
    return f" Parameters for target_parameters are: {listed(fused)}." if fused else ""
