"""A rank's part of a checkpoint: the weights it keeps, as they are in the whole, and nothing of other ranks' read."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstraw.errors import LongStrawError, UnsupportedError
from longstraw.models import loading, part_loading
from longstraw.models.adapters import LoraSettings
from longstraw.models.experts import Part, divide_experts, divided_experts, expert_parameters, experts_modules
from longstraw.models.loading import load_model
from longstraw.parallel.topology import Axis, Topology
from tiny import WITH_EXPERTS, tiny_model


def saved(folder, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_model(name, adapter=False).save_pretrained(folder)
    return folder


def of_rank(rank, degree=2):
    return Topology(expert=Axis(degree, rank))


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_part_is_that_of_the_whole(tmp_path, name):
    folder = str(saved(tmp_path / "model", name))
    for rank in range(2):
        part = load_model(folder, dtype="float32", topology=of_rank(rank))
        whole = load_model(folder, dtype="float32")
        divide_experts(whole, Part(2, rank))
        want, got = dict(whole.named_parameters()), dict(part.named_parameters())
        assert want.keys() == got.keys()
        assert [key for key in want if not torch.equal(want[key], got[key])] == []
        assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), part.buffers(), strict=True))
        assert type(part) is type(whole)
        assert part.name_or_path == folder
        assert [forward.part for forward in divided_experts(part)] == [Part(2, rank)] * len(divided_experts(whole))


class Counting:
    """A tensor in a file that counts the numbers read of it."""

    def __init__(self, tensor, read):
        self.tensor, self.read = tensor, read

    def __getitem__(self, index):
        found = self.tensor[index]
        self.read.append(found.numel())
        return found


@pytest.mark.parametrize("fused", [False, True])
def test_other_ranks_experts_are_not_read(tmp_path, monkeypatch, fused):
    """Both forms a checkpoint keeps experts in: a tensor for each, and one for all of a layer."""
    folder = saved(tmp_path / "model", "qwen3_moe")
    model = load_model(str(folder), dtype="float32")
    of_experts = sum(dict(model.named_parameters())[key].numel() for key in expert_parameters(model))
    total = sum(parameter.numel() for parameter in model.parameters())
    if fused:
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    keys = load_file(folder / "model.safetensors")
    assert any(key.endswith("experts.gate_up_proj") for key in keys) == fused

    read = []
    stock = part_loading.part_of_checkpoint

    def counted(tensors, *args, **kwargs):
        return stock({key: Counting(tensor, read) for key, tensor in tensors.items()}, *args, **kwargs)

    monkeypatch.setattr(part_loading, "part_of_checkpoint", counted)
    part = load_model(str(folder), dtype="float32", topology=of_rank(1, degree=4))
    assert sum(read) == total - of_experts * 3 // 4
    assert sum(parameter.numel() for parameter in part.parameters()) == sum(read)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_is_drawn_as_in_one_process(tmp_path, name):
    folder = str(saved(tmp_path / "model", name))
    adapter = LoraSettings(r=2, target_modules=["q_proj", "o_proj"], target_parameters=["experts.down_proj"])
    models = []
    for topology in (None, of_rank(1)):
        torch.manual_seed(3)
        models.append(load_model(folder, dtype="bfloat16", adapter=adapter, topology=topology))
    divide_experts(models[0], Part(2, 1))
    want, got = (dict(model.named_parameters()) for model in models)
    assert want.keys() == got.keys()
    assert [key for key in want if not torch.equal(want[key], got[key])] == []


@pytest.mark.parametrize(
    ("name", "degree", "sentence"),
    [("llama", 2, "no routed experts to divide"), ("qwen3_moe", 3, "expert=3 does not divide the model's 4 routed")],
)
def test_what_does_not_divide_is_refused_before_weights_are_read(tmp_path, monkeypatch, name, degree, sentence):
    folder = saved(tmp_path / "model", name)
    monkeypatch.setattr(loading, "_read_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(LongStrawError, match=sentence):
        load_model(str(folder), dtype="float32", topology=of_rank(0, degree))


def test_a_checkpoint_that_lacks_an_expert_is_told_so(tmp_path):
    folder = saved(tmp_path / "model", "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if "layers.1.mlp.experts.3." not in key}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(str(folder), dtype="float32", topology=of_rank(0))
    with pytest.raises(LongStrawError):
        load_model(str(folder), dtype="float32", topology=of_rank(1))


def test_a_checkpoint_in_several_files_is_read_from_all_of_them(tmp_path):
    folder = saved(tmp_path / "one", "qwen3_moe")
    model = load_model(str(folder), dtype="float32")
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    want, got = (
        dict(load_model(str(tmp_path / name), dtype="float32", topology=of_rank(1)).named_parameters())
        for name in ("one", "several")
    )
    assert [key for key in want if not torch.equal(want[key], got[key])] == []


def test_a_checkpoint_of_another_kind_of_file_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "qwen3_moe")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(LongStrawError, match="has no safetensors files, of which a part could be read"):
        load_model(str(folder), dtype="float32", topology=of_rank(0))


def test_layers_with_different_numbers_of_experts_are_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outline = tiny_model("qwen3_moe", adapter=False)
    next(iter(experts_modules(outline).values())).num_experts = 2
    with (
        pytest.raises(UnsupportedError, match=r"different numbers of routed experts \[2, 4\]"),
        part_loading.open_part(tmp_path, outline, Part(2, 0)),
    ):
        pass


def test_of_a_hub_id_no_other_files_than_weights_and_settings_are_downloaded(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        part_loading, "snapshot_download", lambda name, allow_patterns: asked.append((name, allow_patterns)) or tmp_path
    )
    assert part_loading.checkpoint_folder("owner/name", is_local=False) == tmp_path
    assert asked == [("owner/name", ["*.safetensors", "*.json"])]
    assert part_loading.checkpoint_folder(str(tmp_path), is_local=True) == tmp_path
    assert len(asked) == 1


def test_a_part_of_the_names_in_a_checkpoint():
    """Only what holds experts is cut or left out: not a shared expert, nor what else an experts module may keep."""
    rows = torch.arange(8.0)
    names = ["a.experts.gate_up_proj", "a.experts.3.w.weight", "a.experts.4.w.weight", "a.experts.7.w.scale"]
    others = ["a.experts.correction", "a.shared_experts.5.w.weight", "a.shared_experts.gate_up_proj", "b.gate_up_proj"]
    kept = part_loading.part_of_checkpoint(
        dict.fromkeys([*names, *others], rows), Part(2, 1), num_experts=8, fused_names={"gate_up_proj"}
    )
    assert kept.keys() == {names[0], "a.experts.0.w.weight", "a.experts.3.w.scale", *others}
    assert kept[names[0]][...].tolist() == [4, 5, 6, 7]
    assert kept[names[0]][1:3].tolist() == [5, 6]
    assert all(kept[name] is rows for name in others)


def test_heads_that_ranks_cannot_share_out_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "qwen3_5_text")
    monkeypatch.setattr(loading, "_read_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(LongStrawError, match="context=3 does not divide the DeltaNet layers' 2 key heads"):
        load_model(str(folder), dtype="float32", topology=Topology(context=Axis(3)))
