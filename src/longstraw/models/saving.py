"""Write what training changed to a folder, and read it back: a peft adapter, or the whole model.

Apart from loading because only training needs it. The files are peft's and transformers' own, so that a checkpoint
folder can be used by both without LongStraw.
"""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedModel

from longstraw.errors import InputError

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def save_trained(model: PeftModel | PreTrainedModel, folder: Path) -> None:
    """Adapter weights and configuration of a peft model, else the whole model, in the dtypes they have."""
    if isinstance(model, PeftModel):
        # The default would ask the hub whether the base's vocabulary grew; frozen embeddings are never ours to save.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        model.save_pretrained(str(folder))


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Copy a saved adapter's weights into the model's, bit for bit.

    Raises `InputError` if the folder has no adapter or it is not of the model's shape.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise InputError(f"checkpoint: {folder} has no {ADAPTER_WEIGHTS}, but the model trains an adapter.")
    weights = load_file(path)
    missing = get_peft_model_state_dict(model, save_embedding_layers=False).keys() - weights.keys()
    if missing:
        raise InputError(f"checkpoint: {path} lacks {min(missing)}, which the model trains.")
    try:
        result = set_peft_model_state_dict(model, weights)
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"checkpoint: the adapter in {folder} is not of the model's shape ({problem}).") from error
    if result.unexpected_keys:
        raise InputError(f"checkpoint: {path} holds {result.unexpected_keys[0]}, which the model does not have.")
