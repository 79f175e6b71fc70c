"""Read one rank's part of a checkpoint: every weight but the routed experts that other ranks keep.

transformers loads a model whose experts modules were made with fewer experts, from a state dict of lazy slices of the
safetensors files: what the state dict does not name, or a slice leaves out, is never read. Checkpoints keep experts in
one of two forms, a tensor for each (`experts.17.up_proj.weight`) or one for all of a layer (`experts.gate_up_proj`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Protocol

from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from longstraw.errors import UnsupportedError
from longstraw.models.experts import Part, divide_experts, experts_modules, num_routed_experts

EXPERT_OF_ITS_OWN = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
FILES = ("*.safetensors", "*.json")


class LazyTensor(Protocol):
    """A tensor in a file, read when it is indexed by `...` or a range of rows (safetensors' `PySafeSlice`)."""

    def __getitem__(self, index: EllipsisType | slice) -> Tensor: ...


@dataclass(frozen=True)
class LazyPart:
    """Rows `begin` to `end` of a tensor in a file; as a whole it is only these."""

    tensor: LazyTensor
    begin: int
    end: int

    def __getitem__(self, index: EllipsisType | slice) -> Tensor:
        return self.tensor[self.begin : self.end][index]


def checkpoint_folder(name: str, *, is_local: bool) -> Path:
    """Where the checkpoint's files are; those of a hub id are downloaded once for a machine."""
    return Path(name) if is_local else Path(snapshot_download(name, allow_patterns=list(FILES)))


@contextmanager
def open_part(folder: Path, outline: PreTrainedModel, part: Part) -> Iterator[dict[str, LazyTensor]]:
    """A checkpoint's tensors by name, other ranks' experts left out and this rank's counted from its first.

    Raises `UnsupportedError` if the layers differ in their number of experts or there are no safetensors files.
    """
    sizes = num_routed_experts(outline)
    if len(sizes) != 1:
        raise UnsupportedError(f"layers with different numbers of routed experts {sorted(sizes)} cannot be divided.")
    names = {own for module in experts_modules(outline).values() for own, _ in module.named_parameters(recurse=False)}
    with ExitStack() as files:
        found: dict[str, LazyTensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            found |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        if not found:
            raise UnsupportedError(f"model: {folder} has no safetensors files, of which a part could be read.")
        yield part_of_checkpoint(found, part, num_experts=sizes.pop(), fused_names=names)


def part_of_checkpoint(
    tensors: Mapping[str, LazyTensor], part: Part, *, num_experts: int, fused_names: set[str]
) -> dict[str, LazyTensor]:
    """Without other ranks' experts. `fused_names`: parameters that hold all experts of a layer."""
    begin, end = part.range(num_experts)
    kept: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        alone = EXPERT_OF_ITS_OWN.fullmatch(key)
        layer, _, last = key.rpartition(".")
        if alone is not None:
            if begin <= int(alone[2]) < end:
                kept[f"{alone[1]}.{int(alone[2]) - begin}.{alone[3]}"] = tensor
        elif layer.endswith(".experts") and last in fused_names:
            kept[key] = LazyPart(tensor, begin, end)
        else:
            kept[key] = tensor
    return kept


def with_fewer_experts(model_class: type[PreTrainedModel], part: Part) -> type[PreTrainedModel]:
    """The class, but what it makes has this part of every layer's experts."""

    def make(self: PreTrainedModel, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        divide_experts(self, part)

    return type(model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__})
