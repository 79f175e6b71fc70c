import os
import shutil

import pytest
import torch

from longstraw.errors import InputError
from longstraw.training.checkpoint import (
    Position,
    find_checkpoint,
    load_position,
    restore,
    rewind,
    save_checkpoint,
)
from longstraw.training.randomness import random_state
from longstraw.training.trained_state import Snapshot


class Killed(BaseException):
    """What no code may catch."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(folder, step, *, optimizer=None, keep=None, value=None):
    def save_weights(target):
        (target / "weights").write_text(str(step if value is None else value))
        (target / "more").mkdir()
        (target / "more" / "weights").write_text("x")

    optimizer = optimizer or torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    position = Position(step=step, rows_drawn=2 * step, num_tokens=7 * step)
    return save_checkpoint(
        folder,
        position,
        snapshot=Snapshot(save_weights, optimizer.state_dict()),
        randomness=random_state(),
        fingerprint="rows",
        keep=keep,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def is_whole(checkpoint):
    position, fingerprint = load_position(checkpoint)
    restore(checkpoint, torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).load_state_dict)
    return fingerprint == "rows" and (checkpoint / "weights").read_text() == str(position.step)


def test_the_latest_checkpoint_is_the_last_saved(folder):
    save(folder, 3)
    save(folder, 6)
    assert find_checkpoint(folder) == folder / "step-000006"
    assert load_position(find_checkpoint(folder))[0] == Position(step=6, rows_drawn=12, num_tokens=42)


FILE_SYSTEM_CALLS = [(os, "fsync"), (os, "rename"), (os, "replace"), (torch, "save"), (os, "unlink"), (os, "open")]


def kill_at(monkeypatch, number):
    """Raise at the n-th call that touches the disk while saving; returns how many there were."""
    count = [0]

    def counted(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == number:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in FILE_SYSTEM_CALLS:
        monkeypatch.setattr(module, name, counted(vars(module)[name]))
    return count


def num_calls_while_saving(folder, monkeypatch):
    save(folder, 1)
    with monkeypatch.context() as patch:
        count = kill_at(patch, -1)
        save(folder, 2, keep=1)
    return count[0]


def test_a_kill_at_any_moment_of_saving_leaves_a_usable_latest_checkpoint(folder, tmp_path, monkeypatch):
    num_calls = num_calls_while_saving(tmp_path / "count", monkeypatch)
    assert num_calls > 15
    outcomes = set()
    for number in range(1, num_calls + 1):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1)
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            with pytest.raises(Killed):
                save(folder, 2, keep=1)
        latest = find_checkpoint(folder)
        assert all(is_whole(path) for path in folder.glob("step-*")), f"killed at call {number}"
        outcomes.add(latest.name)
        # The next attempt, as a resumed run makes it, succeeds.
        rewind(folder, latest)
        save(folder, 2, keep=1)
        assert find_checkpoint(folder).name == "step-000002"
        assert names(folder) == ["latest", "step-000002"] or "set-aside" in names(folder)
    assert outcomes == {"step-000001", "step-000002"}


def test_a_failing_save_of_weights_leaves_the_latest_checkpoint(folder):
    save(folder, 1)
    with pytest.raises(RuntimeError, match="disk full"):
        save_checkpoint(
            folder,
            Position(step=2),
            snapshot=Snapshot(lambda target: (_ for _ in ()).throw(RuntimeError("disk full")), {}),
            randomness=random_state(),
            fingerprint="rows",
            keep=1,
        )
    assert find_checkpoint(folder).name == "step-000001"


def test_only_the_newest_checkpoints_are_kept(folder):
    for step in (1, 2, 3, 10):
        save(folder, step, keep=2)
    assert names(folder) == ["latest", "step-000003", "step-000010"]


def test_going_back_sets_newer_checkpoints_aside_and_deletes_nothing(folder):
    for step in (1, 2, 3):
        save(folder, step)
    assert rewind(folder, folder / "step-000001") == ["step-000002", "step-000003"]
    assert find_checkpoint(folder).name == "step-000001"
    save(folder, 2, keep=2)
    assert names(folder) == ["latest", "set-aside", "step-000001", "step-000002"]
    assert names(folder / "set-aside") == ["step-000002-1", "step-000003-1"]
    rewind(folder, folder / "step-000001")
    assert names(folder / "set-aside") == ["step-000002-1", "step-000002-2", "step-000003-1"]


def test_optimizer_state_comes_back_bit_for_bit(folder):
    parameter = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.randn(5)
        optimizer.step()
    checkpoint = save(folder, 1, optimizer=optimizer)
    other = torch.optim.AdamW([torch.nn.Parameter(parameter.detach().clone())], lr=0.5)
    restore(checkpoint, other.load_state_dict)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_what_is_not_a_checkpoint_is_refused_by_name(folder, tmp_path):
    with pytest.raises(InputError, match=r"no checkpoint in .* to resume from"):
        find_checkpoint(folder)
    save(folder, 1)
    with pytest.raises(InputError, match=r"is not a checkpoint \(position\.json is missing\); there are: step-000001"):
        find_checkpoint(folder, tmp_path)
    (folder / "step-000001" / "optimizer.pt").unlink()
    with pytest.raises(InputError, match=r"optimizer\.pt is missing"):
        find_checkpoint(folder)
