import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longstraw.errors import InputError
from longstraw.models.adapters import LoraSettings, with_adapter
from longstraw.models.saving import ADAPTER_WEIGHTS, load_adapter, save_trained
from longstraw.models.tiny import random_model, tiny_config
from tiny import random_ids

# Upstream's own deprecation, transformers 5.24 with peft 0.21.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def base(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype)


def adapted(r=3, *, seed=0, targets="all-linear", dtype=torch.float32):
    settings = LoraConfig(r=r, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base(seed, dtype), settings)


def trained(model):
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_comes_back_bit_for_bit(tmp_path, dtype):
    model, other = adapted(dtype=dtype), adapted(dtype=dtype, seed=1)
    save_trained(model, tmp_path)
    load_adapter(other, tmp_path)
    wanted, got = trained(model), trained(other)
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert all(value.dtype == wanted[name].dtype for name, value in got.items())


def test_the_adapter_folder_is_pefts_own(tmp_path):
    save_trained(adapted(targets=["q_proj"]), tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    assert sorted(load_file(tmp_path / ADAPTER_WEIGHTS)) == [
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
        for layer in (0, 1)
        for half in "AB"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_model_comes_back_bit_for_bit(tmp_path, dtype):
    model = base(dtype=dtype)
    save_trained(model, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors, but the model trains an adapter"):
        load_adapter(adapted(), tmp_path)
    save_trained(adapted(), tmp_path)
    with pytest.raises(InputError, match="is not of the model's shape"):
        load_adapter(adapted(r=4), tmp_path)
    with pytest.raises(InputError, match="which the model does not have"):
        load_adapter(adapted(targets=["q_proj"]), tmp_path)


def test_an_adapter_with_missing_weights_is_refused(tmp_path):
    save_trained(adapted(), tmp_path)
    weights = load_file(tmp_path / ADAPTER_WEIGHTS)
    weights.pop(sorted(weights)[0])
    save_file(weights, tmp_path / ADAPTER_WEIGHTS)
    with pytest.raises(InputError, match=r"lacks base_model.*lora_A"):
        load_adapter(adapted(), tmp_path)


@pytest.mark.parametrize("experts", [[], ["experts.gate_up_proj", "experts.down_proj"]], ids=["linear", "experts too"])
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v3", "qwen3_next", "qwen3_moe", "llama"])
def test_plain_peft_puts_a_saved_adapter_where_it_was_trained(name, experts, tmp_path):
    """Shared experts and dense layers of mixture-of-experts models are named as peft reads fused experts."""
    experts = [] if name == "llama" else experts
    model = with_adapter(plain_model(name), LoraSettings(r=4, target_parameters=experts))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
    save_trained(model, tmp_path)
    again = PeftModel.from_pretrained(plain_model(name), tmp_path)
    ids = random_ids(40, 1)[None]
    with torch.no_grad():
        got, want, base_only = (m.eval()(ids, use_cache=False).logits for m in (again, model, plain_model(name)))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert float((want - base_only).abs().max()) > 0.1


def plain_model(name):
    torch.manual_seed(0)
    return random_model(tiny_config(name), torch.float32)
