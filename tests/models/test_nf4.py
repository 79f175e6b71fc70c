"""NF4 weights: the exact gradient of the adapters, also after a capture and sampling without autograd."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from longstraw.execution.engine import Engine
from longstraw.models.families import FAMILIES
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings
from tiny import adapted_with_experts, full_gradients, gradients, random_ids, tiny_model, worst_error

pytest.importorskip("bitsandbytes")

LATENT = [name for name, family in FAMILIES.items() if family.latent]
# 4-bit layers need 64 numbers a side.
WIDE_LATENT = dict(q_lora_rank=64, kv_lora_rank=64, index_head_dim=64, moe_intermediate_size=64)
PROMPT, RESPONSES = random_ids(45, 1), [random_ids(length, length) for length in (20, 1, 7)]


def quantized(folder):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=settings
    )
    torch.manual_seed(5)
    if model.config.model_type in LATENT:
        return adapted_with_experts(model)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def mean_nll(logprobs):
    return -sum(part.mean() for part in logprobs)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", *LATENT])
def test_exact_gradient_on_nf4_weights_equals_full_sequence_autograd(name, tmp_path):
    widths = WIDE_LATENT if name in LATENT else dict(head_dim=32)
    if name == "deepseek_v3":
        widths = {key: value for key, value in widths.items() if key != "index_head_dim"}
    tiny_model(name, adapter=False, hidden_size=64, **widths).save_pretrained(tmp_path)
    want = full_gradients(quantized(tmp_path).train(), PROMPT, RESPONSES, mean_nll)
    model = quantized(tmp_path).eval()
    engine, prompt = Engine(model, chunk_tokens=16), Prompt(PROMPT)
    with engine.capture(prompt) as state:
        engine.sample(state, 2, SamplingSettings(max_new_tokens=3))  # must not repack the weights for inference
        engine.forward_backward([ResponseGroup(prompt, [Response(ids) for ids in RESPONSES])], mean_nll, [state])
    assert len(gradients(model)) == len(want)
    error, tensor = worst_error(gradients(model), want)
    assert error <= 5e-4, f"{tensor}: relative error {error:.1e}"
