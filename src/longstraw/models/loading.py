"""Load a causal language model and its tokenizer: hub id, folder, or GGUF file; LoRA and 4-bit weights on request.

Apart from the families because it does not care how a model is driven. What cannot work is refused before weights are
read: the adapter and the quantization are checked on a model without memory ("meta" tensors) first. A local path
never reaches for the network.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from longstraw.errors import InputError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ALL_LINEAR = "all-linear"
MIN_NF4_WIDTH = 64  # one block of 4-bit weights shares a scale
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class LoraSettings:
    """The low-rank adapter that is trained instead of the weights.

    `alpha`: numerator of the scale alpha / r; None is 2 * r. `target_modules` as in peft: "all-linear", one regular
    expression over whole names, or a list of names or endings of names. `target_parameters`: names or endings of bare
    parameters, the fused experts of mixture-of-experts models. Raises `InputError` if nothing could be trained.
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


@dataclass(frozen=True)
class _Source:
    """Where files are read from. `is_local` keeps every reader off the network."""

    name: str
    gguf_file: str | None
    is_local: bool

    @property
    def label(self) -> str:
        """What errors call it."""
        if not self.is_local:
            return f"model {self.name!r} (there is no such folder, so it was looked up on the hub)"
        return f"model {str(Path(self.name, self.gguf_file or ''))!r}"


def load_model(
    name: str,
    *,
    dtype: str = "bfloat16",
    adapter: LoraSettings | None = None,
    quantization: Literal["nf4"] | None = None,
    gguf_file: str | None = None,
    device: str = "auto",
) -> PreTrainedModel | PeftModel:
    """The model, ready to train: all parameters require grad, or with `adapter` only the adapter's.

    `name`: hub id, folder (of transformers files, or with exactly one .gguf file), or path of a .gguf file, whose
    weights are unpacked to `dtype` ("bfloat16", "float16", "float32"). Adapter parameters are float32 and drawn from
    torch's generator. `quantization="nf4"` keeps linear weights in 4 bits and needs an adapter. `device`: "auto" is a
    CUDA device if there is one, else the CPU. A multimodal checkpoint gives its text model.

    Raises `InputError`, one sentence: no such folder or model, weights missing from the checkpoint, unknown dtype or
    device, an adapter that would train nothing (with the names that exist), 4 bits that cannot work.
    """
    torch_dtype = _torch_dtype(dtype)
    place = _torch_device(device)
    source = _find(name, gguf_file)
    _check_quantization(quantization, adapter, source)
    _check_gguf(source)
    with _quiet(), _one_sentence(source.label):
        config = AutoConfig.from_pretrained(
            source.name, gguf_file=source.gguf_file, local_files_only=source.is_local, trust_remote_code=False
        )
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if quantization is not None:
        _check_widths(outline)
    if adapter is not None:
        _check_targets(outline, adapter)
    model = _read_weights(source, config, torch_dtype, quantization=quantization, device=place)
    if adapter is None:
        return model.requires_grad_(True)
    return _with_adapter(model, adapter)


def load_tokenizer(name: str, *, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of what `load_model` loads by the same name. Raises `InputError` if there is none."""
    source = _find(name, gguf_file)
    _check_gguf(source)
    with _quiet(), _one_sentence(f"tokenizer of {source.label}"):
        return AutoTokenizer.from_pretrained(
            source.name, gguf_file=source.gguf_file, local_files_only=source.is_local, trust_remote_code=False
        )


def _torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InputError(f"model: dtype {name!r} is not supported; it must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _torch_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"model: device {name!r} is not known; it must be auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"model: device {name!r} was asked for, {torch.cuda.device_count()} CUDA devices are here.")
    return device


def _find(name: str, gguf_file: str | None) -> _Source:
    """What `name` means, decided on the local disk."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _Source(str(path), _gguf_in(path, gguf_file), is_local=True)
    if path.is_file():
        if path.suffix != ".gguf" or gguf_file is not None:
            raise InputError(f"model {name!r} is a file; give a folder, a hub id, or the path of one .gguf file.")
        return _Source(str(path.parent), path.name, is_local=True)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or path.suffix == ".gguf":
        raise InputError(f"model {name!r}: there is no such folder or file, and it is not a hub id (owner/name).")
    return _Source(name, gguf_file, is_local=False)


def _gguf_in(folder: Path, gguf_file: str | None) -> str | None:
    """The GGUF file to read in a local folder, or None if it holds transformers' own files."""
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise InputError(f"model: {folder} holds no file {gguf_file!r}; its GGUF files are: {_listed(found)}.")
        return gguf_file
    if (folder / "config.json").is_file() and any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        return None
    if len(found) > 1:
        raise InputError(f"model: {folder} holds several GGUF files, name one as gguf_file: {_listed(found)}.")
    if found:
        return found[0]
    if not (folder / "config.json").is_file():
        raise InputError(f"model: the folder {folder} holds neither a config.json nor a .gguf file.")
    return None


def _check_quantization(quantization: str | None, adapter: LoraSettings | None, source: _Source) -> None:
    if quantization is None:
        return
    if quantization != "nf4":
        raise InputError(f"model: quantization {quantization!r} is not supported; it must be nf4 or left out.")
    if adapter is None:
        raise InputError("model: nf4 weights are frozen, so nothing would be trained; give an adapter as well.")
    if source.gguf_file is not None:
        raise InputError("model: nf4 cannot be made from a GGUF file; save the unpacked model to a folder first.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError("model: nf4 needs bitsandbytes, which is not installed; run: pip install 'longstraw[nf4]'.")


def _check_gguf(source: _Source) -> None:
    if source.gguf_file is not None and importlib.util.find_spec("gguf") is None:
        raise InputError("model: GGUF files need gguf, which is not installed; run: pip install 'longstraw[gguf]'.")


def _linear_widths(model: nn.Module) -> Iterator[tuple[str, int]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, min(module.in_features, module.out_features)


def _check_widths(outline: PreTrainedModel) -> None:
    head = outline.get_output_embeddings()
    for name, width in _linear_widths(outline):
        if width < MIN_NF4_WIDTH and outline.get_submodule(name) is not head:
            raise InputError(
                f"model: nf4 needs linear layers at least {MIN_NF4_WIDTH} wide, {name} is {width}; "
                "leave quantization out for so small a model."
            )


def _check_targets(outline: PreTrainedModel, settings: LoraSettings) -> None:
    """Refuse an adapter that fits nothing; warn of single names that do, as peft drops them without a word."""
    modules = [name for name, _ in outline.named_modules() if name]
    parameters = [name for name, _ in outline.named_parameters()]
    linear = sorted({name.rpartition(".")[2] for name, _ in _linear_widths(outline)})
    unmatched = _unmatched(settings.target_parameters, parameters)
    num_targets = len(settings.target_modules) + len(settings.target_parameters)
    if isinstance(settings.target_modules, str):
        num_targets = 1 + len(settings.target_parameters)
        pattern = settings.target_modules
        if pattern.lower() != ALL_LINEAR and not any(_fits(pattern, name) for name in modules):
            unmatched.append(pattern)
    else:
        unmatched += _unmatched(settings.target_modules, modules)
    if not unmatched:
        return
    if len(unmatched) == num_targets:
        raise InputError(
            f"adapter: {_listed(unmatched)} fits no module or parameter of the model, the adapter would train "
            f"nothing; its linear layers are: {_listed(linear)}.{_bare_parameters(outline)}"
        )
    nearest = difflib.get_close_matches(unmatched[0], linear, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "."
    warnings.warn(f"adapter: no part of the model is called {_listed(unmatched)}{hint}", stacklevel=3)


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise InputError(f"adapter: target_modules {pattern!r} is not a regular expression ({error}).") from None


def _unmatched(targets: Sequence[str], names: Sequence[str]) -> list[str]:
    return [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]


def _bare_parameters(outline: PreTrainedModel) -> str:
    """A sentence on parameters with three or more dimensions, which `target_parameters` is for, if there are any."""
    fused = sorted({".".join(name.split(".")[-2:]) for name, value in outline.named_parameters() if value.dim() >= 3})
    fused = [name for name in fused if not name.endswith(".weight")]
    return f" Parameters for target_parameters are: {_listed(fused)}." if fused else ""


def _read_weights(
    source: _Source, config: PretrainedConfig, dtype: torch.dtype, *, quantization: str | None, device: torch.device
) -> PreTrainedModel:
    quantizer: BitsAndBytesConfig | GgufConfig | None = None
    if source.gguf_file is not None:
        # Packed weights would be unpacked again in every forward.
        quantizer = GgufConfig(dequantize=True)
    elif quantization == "nf4":
        quantizer = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    with _quiet(), _one_sentence(source.label):
        model, found = AutoModelForCausalLM.from_pretrained(
            source.name,
            gguf_file=source.gguf_file,
            dtype=dtype,
            quantization_config=quantizer,
            device_map={"": device},
            local_files_only=source.is_local,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise InputError(
            f"{source.label}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint, the first "
            f"is {missing[0]}; the files are incomplete or of another model."
        )
    if quantization == "nf4":
        # In eval mode on a CPU, 4-bit layers repack their weights for inference and lose the gradient (bitsandbytes
        # 0.50); no supported model has dropout, so training mode changes nothing else.
        model.train()
    return model


def _with_adapter(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    modules = settings.target_modules
    config = LoraConfig(
        r=settings.r,
        lora_alpha=2 * settings.r if settings.alpha is None else settings.alpha,
        target_modules=modules if isinstance(modules, str) else list(modules),
        target_parameters=list(settings.target_parameters) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with _one_sentence("adapter"), warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 renamed; nothing a user could do about it.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        adapted = get_peft_model(model, config)
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise InputError("adapter: it fits no part of the model and would train nothing.")
    return adapted


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Turn what the libraries raise for a name, file or setting that does not work into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        problem = " ".join(str(error).split())
        first = re.split(r"(?<=[a-z)'\"])\. ", problem, maxsplit=1)[0].rstrip(".")
        raise InputError(f"{what} cannot be loaded: {first or type(error).__name__}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own progress bars, which would tear ours."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12]) or "none"
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"
