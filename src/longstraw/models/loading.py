"""Load a causal language model and its tokenizer: hub id, folder, or GGUF file; LoRA and 4-bit weights on request.

Apart from the families because it does not care how a model is driven. What cannot work is refused before weights are
read: the adapter and the quantization are checked on a model without memory ("meta" tensors) first. A local path
never reaches for the network.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from longstraw.errors import InputError
from longstraw.models.adapters import LoraSettings, check_targets, with_adapter
from longstraw.models.experts import ExpertAxis, Part
from longstraw.models.part_loading import checkpoint_folder, open_part, with_fewer_experts
from longstraw.models.wording import listed, one_sentence

__all__ = ["LoraSettings", "load_model", "load_tokenizer", "torch_dtype"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MIN_NF4_WIDTH = 64  # one block of 4-bit weights, inputs of one output, shares a scale
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


class DividesModels(Protocol):
    """A `Topology`: which part of the experts this process has, and whether it can share out DeltaNet's heads."""

    @property
    def expert(self) -> ExpertAxis: ...

    def check_heads(self, num_key_heads: int, num_value_heads: int) -> None: ...


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
    topology: DividesModels | None = None,
) -> PreTrainedModel | PeftModel:
    """The model, ready to train: all parameters require grad, or with `adapter` only the adapter's.

    `name`: hub id, folder (of transformers files, or with exactly one .gguf file), or path of a .gguf file, whose
    weights are unpacked to `dtype` ("bfloat16", "float16", "float32"). Adapter parameters are float32 and drawn from
    torch's generator. `quantization="nf4"` keeps linear weights in 4 bits and needs an adapter. `device`: "auto" is a
    CUDA device if there is one, else the CPU. A multimodal checkpoint gives its text model. With a `topology`
    that has an expert axis, this rank's part of the routed experts is loaded, for an `Engine` with the same topology.

    Raises `InputError`, one sentence: no such folder or model, weights missing from the checkpoint, unknown dtype or
    device, an adapter that would train nothing (with the names that exist), 4 bits that cannot work. Warns once if
    "all-linear" leaves out the indexers of sparse attention.
    """
    weight_dtype = torch_dtype(dtype)
    place = _torch_device(device)
    source = _find(name, gguf_file)
    _check_quantization(quantization, adapter, source)
    _check_gguf(source)
    with quiet(), one_sentence(source.label):
        config = AutoConfig.from_pretrained(
            source.name, gguf_file=source.gguf_file, local_files_only=source.is_local, trust_remote_code=False
        )
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if quantization is not None:
        _check_widths(outline)
    if adapter is not None:
        check_targets(outline, adapter)
    part = None if topology is None else _own_part(topology, outline)
    model = _read_weights(source, outline, weight_dtype, quantization=quantization, device=place, part=part)
    if adapter is None:
        return model.requires_grad_(True)
    return with_adapter(model, adapter)


def load_tokenizer(name: str, *, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of what `load_model` loads by the same name. Raises `InputError` if there is none."""
    source = _find(name, gguf_file)
    _check_gguf(source)
    with quiet(), one_sentence(f"tokenizer of {source.label}"):
        return AutoTokenizer.from_pretrained(
            source.name, gguf_file=source.gguf_file, local_files_only=source.is_local, trust_remote_code=False
        )


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in `DTYPES`. Raises `InputError` for any other."""
    if name not in DTYPES:
        raise InputError(f"model: dtype {name!r} is not supported; it must be one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _torch_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
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
            raise InputError(f"model: {folder} holds no file {gguf_file!r}; its GGUF files are: {listed(found)}.")
        return gguf_file
    if (folder / "config.json").is_file() and any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        return None
    if len(found) > 1:
        raise InputError(f"model: {folder} holds several GGUF files, name one as gguf_file: {listed(found)}.")
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


def _check_widths(outline: PreTrainedModel) -> None:
    head = outline.get_output_embeddings()
    kept = tuple(outline._keep_in_fp32_modules or ())  # transformers leaves these out of 4 bits: index weights
    for name, module in outline.named_modules():
        width = module.in_features if isinstance(module, nn.Linear) else MIN_NF4_WIDTH
        if width < MIN_NF4_WIDTH and outline.get_submodule(name) is not head and not name.endswith(kept):
            raise InputError(
                f"model: nf4 needs linear layers of at least {MIN_NF4_WIDTH} inputs, {name} has {width}; "
                "leave quantization out for so small a model."
            )


def _read_weights(
    source: _Source,
    outline: PreTrainedModel,
    dtype: torch.dtype,
    *,
    quantization: str | None,
    device: torch.device,
    part: Part | None,
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
    with quiet(), one_sentence(source.label):
        settings = {
            "dtype": dtype,
            "quantization_config": quantizer,
            "device_map": {"": device},
            "output_loading_info": True,
        }
        if part is None:
            model, found = AutoModelForCausalLM.from_pretrained(
                source.name,
                gguf_file=source.gguf_file,
                local_files_only=source.is_local,
                trust_remote_code=False,
                **settings,
            )
        else:
            model, found = _read_part(source, outline, part, settings)
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


def _own_part(topology: DividesModels, outline: PreTrainedModel) -> Part | None:
    """This rank's part of the experts, if they are divided. Raises `UnsupportedError` for what does not divide."""
    for _, module in outline.named_modules():
        if hasattr(module, "num_k_heads") and hasattr(module, "num_v_heads"):
            topology.check_heads(module.num_k_heads, module.num_v_heads)
    return Part.of_axis(topology.expert, outline) if topology.expert.degree > 1 else None


def _read_part(
    source: _Source, outline: PreTrainedModel, part: Part, settings: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with this part of the routed experts; the others' weights are not read."""
    if source.gguf_file is not None:
        raise InputError(f"{source.label}: experts of a GGUF file cannot be divided; save the model to a folder first.")
    folder = checkpoint_folder(source.name, is_local=source.is_local)
    model_class = type(outline)
    with open_part(folder, outline, part) as tensors:
        model, found = with_fewer_experts(model_class, part).from_pretrained(
            None, config=outline.config, state_dict=tensors, **settings
        )
    model.__class__ = model_class
    model.config.name_or_path = model.name_or_path = source.name  # adapters are saved with it
    return model, found


def silence_warnings() -> None:
    """No more than errors from transformers' own logger: in a job every rank would repeat them."""
    transformers_logging.set_verbosity_error()


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars, which would tear ours."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
