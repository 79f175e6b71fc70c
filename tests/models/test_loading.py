"""Loading: what is read from where, what trains afterwards, and which wish is refused in which words."""

import socket

import gguf
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from longstraw.errors import InputError
from longstraw.models import loading
from longstraw.models.adapters import LoraSettings
from longstraw.models.loading import load_model, load_tokenizer
from tiny import tiny_model

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # 4-bit blocks need 64
WIDE_LATENT = dict(
    hidden_size=64, intermediate_size=128, q_lora_rank=64, kv_lora_rank=64, moe_intermediate_size=64, index_head_dim=64
)
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small llama with a tokenizer, as transformers saves it."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", adapter=False, num_hidden_layers=2, **WIDE).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any look-up of an address fails the test."""

    def refuse(*_, **__):
        pytest.fail("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def write_gguf(path, model):
    """The model's weights as llama.cpp names and lays them out: MLPs in 8-bit blocks, the rest in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        if name.split(".")[-2] in heads:  # llama.cpp interleaves the two halves that are rotated
            value = value.unflatten(0, (heads[name.split(".")[-2]], 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(value.numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_without_adapter_every_parameter_trains_in_the_asked_dtype(folder):
    model = load_model(str(folder), dtype="float32")
    assert len(trainable(model)) == len(list(model.parameters()))
    expected = tiny_model("llama", adapter=False, num_hidden_layers=2, **WIDE).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert {parameter.dtype for parameter in load_model(str(folder)).parameters()} == {torch.bfloat16}


def test_with_adapter_only_it_trains_in_float32_and_every_linear_layer_has_one(folder):
    model = load_model(str(folder), adapter=LoraSettings(r=3))
    assert isinstance(model, PeftModel)
    adapted = trainable(model)
    assert {value.dtype for value in adapted.values()} == {torch.float32}
    assert all("lora_" in name for name in adapted)
    assert len(adapted) == 2 * 2 * len(LINEAR_NAMES)
    assert {value.dtype for name, value in model.named_parameters() if name not in adapted} == {torch.bfloat16}


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_stay_as_they_are_and_that_is_said_once(tmp_path, name, quantization):
    tiny_model(name, adapter=False, num_hidden_layers=2, **WIDE_LATENT).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="all-linear leaves out the .* linear layers of the indexers") as caught:
        model = load_model(str(tmp_path), adapter=LoraSettings(r=2), quantization=quantization)
    assert [(warning.category, warning.filename) for warning in caught] == [(UserWarning, __file__)]
    assert "kv_b_proj" in "".join(trainable(model))
    assert not any(".indexer." in name for name in trainable(model))
    indexer = model.base_model.model.model.layers[0].self_attn.indexer
    assert type(indexer.weights_proj) is nn.Linear, "16 wide, kept out of 4 bits"
    model(torch.arange(3, 43)[None]).logits.float().square().sum().backward()
    assert all(value.grad is not None for value in trainable(model).values())


@pytest.mark.parametrize("targets", [["wk", "wq_b"], r".*\.indexer\..*"])
def test_adapter_on_indexers_alone_is_refused_before_weights_are_read(tmp_path, monkeypatch, targets):
    tiny_model("deepseek_v32", adapter=False, num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "_read_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="parts of indexers only"):
        load_model(str(tmp_path), adapter=LoraSettings(target_modules=targets))


def test_nf4_keeps_frozen_weights_in_4_bits_and_the_adapter_gets_gradients(folder):
    model = load_model(str(folder), adapter=LoraSettings(r=2), quantization="nf4")
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() * 2 == 64 * 128
    assert layer.weight.quant_state.nested
    assert layer.training, "in eval mode it would repack its weights for inference"
    model(torch.tensor([[3, 4, 5]])).logits.float().square().sum().backward()
    assert all(value.grad is not None for value in trainable(model).values())


def test_multimodal_checkpoint_gives_its_text_model(tmp_path):
    text = tiny_model("qwen3_5_text", adapter=False).config.to_dict()
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32")
    assert model.config.model_type == "qwen3_5_text"
    expected = whole.model.language_model.state_dict()
    for name, value in model.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_gguf_file_loads_by_its_path_and_by_its_folder_as_plain_weights(tmp_path):
    model = tiny_model("llama", adapter=False, num_hidden_layers=2, **WIDE)
    write_gguf(tmp_path / "weights.gguf", model)
    for name in (tmp_path / "weights.gguf", tmp_path):
        loaded = load_model(str(name), dtype="float32")
        assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
        for key, value in loaded.state_dict().items():
            atol = 0.01 if "mlp" in key else 0  # half a step of 8 bits
            torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=atol)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(InputError, match=r"several GGUF files.*other\.gguf, weights\.gguf"):
        load_model(str(tmp_path))
    assert load_model(str(tmp_path), dtype="float32", gguf_file="weights.gguf").config.num_hidden_layers == 2


def test_weights_win_over_a_gguf_file_beside_them(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.gguf").touch()
    assert load_model(str(tmp_path)).config.num_hidden_layers == 2


def test_checkpoint_that_lacks_weights_is_refused_instead_of_filled_with_random_ones(tmp_path):
    model = tiny_model("llama", adapter=False, num_hidden_layers=2)
    weights = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(InputError, match=r"3 weights of LlamaForCausalLM .* the first is model\.layers\.1\.mlp"):
        load_model(str(tmp_path))


def test_tokenizer_comes_from_the_same_place(folder, tmp_path):
    assert load_tokenizer(str(folder)).encode("two one") == [4, 3]
    tiny_model("llama", adapter=False, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "bf16"}, "dtype 'bf16' is not supported; it must be one of bfloat16, float16, float32"),
        ({"device": "gpu"}, "device 'gpu' is not known"),
        ({"device": "cuda:99"}, "device 'cuda:99' was asked for"),
        ({"quantization": "int8"}, "quantization 'int8' is not supported"),
        ({"quantization": "nf4"}, "give an adapter"),
        ({"gguf_file": "a.gguf"}, "holds no file 'a.gguf'"),
        ({"adapter": LoraSettings(target_modules=["qproj"])}, "qproj fits no .* train nothing; .* q_proj"),
        ({"adapter": LoraSettings(target_modules="qproj.*")}, "fits no .* train nothing; .* q_proj"),
        ({"adapter": LoraSettings(target_modules="(")}, "not a regular expression"),
        ({"adapter": LoraSettings(target_modules=["input_layernorm"])}, "LlamaRMSNorm.* is not supported"),
        ({"adapter": LoraSettings(target_modules=[], target_parameters=["w9"])}, "w9 fits no module or parameter"),
    ],
)
def test_wish_that_cannot_work_is_refused_before_weights_are_read(folder, monkeypatch, settings, sentence):
    if "LlamaRMSNorm" not in sentence:  # peft alone knows which modules it can adapt
        monkeypatch.setattr(loading, "_read_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=sentence):
        load_model(str(folder), **settings)


def test_nf4_is_refused_without_bitsandbytes_and_for_narrow_layers(folder, tmp_path, monkeypatch):
    tiny_model("llama", adapter=False, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"at least 64 inputs, model\.layers\.0\.self_attn\.q_proj has 32"):
        load_model(str(tmp_path), adapter=LoraSettings(), quantization="nf4")
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'longstraw\[nf4\]'"):
        load_model(str(folder), adapter=LoraSettings(), quantization="nf4")


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "no/such/folder", "weights.gguf", ""])
def test_missing_folder_is_named_without_asking_the_network(name):
    with pytest.raises(InputError, match="there is no such folder or file"):
        load_model(name)


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"holds neither a config\.json nor a \.gguf file"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be loaded: "):
        load_model(str(tmp_path))


def test_unknown_hub_id_gives_one_sentence():
    with pytest.raises(InputError, match=r"'nobody/nothing' \(there is no such folder, .* hub\) cannot") as error:
        load_model("nobody/nothing")
    assert "\n" not in str(error.value)
