"""Write what training changed to a folder, and read it back: a peft adapter, or the whole model.

Apart from loading because only training needs it. The files are peft's and transformers' own, so that a checkpoint
folder can be used by both without LongStraw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from longstraw.errors import InputError
from longstraw.models.experts import divided_experts, expert_parameters
from longstraw.models.loading import quiet

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# What peft 0.21 reads as fused experts or routers of some mixture-of-experts models, wherever a target ends in it.
REREAD_NAMES = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")


def save_trained(model: nn.Module, folder: Path, whole: Mapping[str, Tensor] | None = None) -> None:
    """Adapter weights and configuration of a peft model, else the whole model, in the dtypes they have.

    `whole`: parameters, by name, of which the model itself holds a part only (divided experts).
    """
    assert isinstance(model, PeftModel | PreTrainedModel), "what load_model returns"
    state = {**model.state_dict(), **whole} if whole else None
    if isinstance(model, PeftModel):
        # The default would ask the hub whether the base's vocabulary grew; frozen embeddings are never ours to save.
        model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=state)
        _keep_names_from_being_reread(model, folder / ADAPTER_CONFIG)
    else:
        with quiet():
            model.save_pretrained(str(folder), state_dict=state)


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Copy a saved adapter's weights into the model's, bit for bit; of divided experts this rank's part.

    Raises `InputError` if the folder has no adapter or it is not of the model's shape.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise InputError(f"checkpoint: {folder} has no {ADAPTER_WEIGHTS}, but the model trains an adapter.")
    weights = load_file(path)
    missing = get_peft_model_state_dict(model, save_embedding_layers=False).keys() - weights.keys()
    if missing:
        raise InputError(f"checkpoint: {path} lacks {min(missing)}, which the model trains.")
    for forward in divided_experts(model)[:1]:  # all layers are divided alike
        for name, (layout, num_local) in expert_parameters(model).items():
            key = name.replace(".default", "")  # files leave the adapter's name out
            if key in weights:
                weights[key] = forward.part.of(weights[key], layout, num_local * forward.part.degree)
    try:
        result = set_peft_model_state_dict(model, weights)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"checkpoint: the adapter in {folder} is not of the model's shape ({problem}).") from error
    if result.unexpected_keys:
        raise InputError(f"checkpoint: {path} holds {result.unexpected_keys[0]}, which the model does not have.")


def _keep_names_from_being_reread(model: PeftModel, path: Path) -> None:
    """Name shared experts and dense layers of mixture-of-experts models so that peft finds them again.

    A weight is named as a parameter instead of its layer: the adapter is the same, under the same keys, and peft's
    reading of old checkpoints leaves parameters alone.
    """
    base = model.get_base_model()
    has_experts = any(name.endswith("experts") for name, _ in base.named_modules())
    adapted = [
        name
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), nn.Linear)
    ]
    reread = [name for name in adapted if name.rpartition(".")[2] in REREAD_NAMES]
    if not (has_experts and reread):
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    config["target_modules"] = sorted(set(adapted) - set(reread))
    config["target_parameters"] = [*(config["target_parameters"] or []), *(f"{name}.weight" for name in reread)]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
