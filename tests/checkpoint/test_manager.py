"""One process saves and loads; what goes wrong on the way costs a save, never a checkpoint."""

import json
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from titanlike.checkpoint import folders, loading, manifest, storage
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.errors import CheckpointError

Make = Callable[..., CheckpointManager]
MODES = ("disabled", "async", "async_with_pinned_mem")
STATE = {"counters": {"tokens": 12, "note": "x"}, "data": {"position": 3}, "nothing": None, "seed": 2**63}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(33, 17, generator=generator),
        "layers.0.bias": torch.randn(3, generator=generator).bfloat16(),
        "slice": torch.randn(10, 4, generator=generator).T[1:3],  # neither contiguous nor all of its storage
        "empty": torch.zeros(0, 5),
        "optimizer.layers.0.weight.step": torch.tensor(float(seed)),
        "count": torch.tensor([seed], dtype=torch.int64),
    }


def copied(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def loaded(manager: CheckpointManager, step: int = -1) -> dict[str, torch.Tensor]:
    found = manager.find(step)
    assert found is not None
    values = {name: torch.full_like(value, 9) for name, value in tensors().items()}
    manager.load(found, values)
    return values


def complete_steps(folder: Path) -> list[int]:
    return [one.step for one in folders.scan(folder) if one.complete]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_loaded_is_what_was_saved(manager: Make, mode: str) -> None:
    saved = tensors(1)
    first = manager(async_mode=mode)
    assert first.find() is None
    first.save(5, saved, STATE)
    found = first.find()
    assert found is not None and (found.step, found.state) == (5, STATE)
    assert same(loaded(manager()), saved)
    names = {".metadata", "__0_0.distcp", "config.toml", "manifest.json", "state.json"}
    assert {path.name for path in found.path.iterdir()} == names
    assert (found.path / "config.toml").read_text() == "a = 1\n"
    content = manifest.read(found.path)
    assert content.topology == {"dp": 1} and content.counters == STATE["counters"]
    assert content.files.keys() == names - {"manifest.json"}


@pytest.mark.parametrize("mode", MODES)
def test_updates_after_save_are_not_saved(manager: Make, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing is held back until the weights have changed, over and over with the same buffers."""
    released = threading.Event()
    monkeypatch.setattr(storage, "fault", lambda phase, step: released.wait(10))
    if mode == "disabled":
        released.set()
    first = manager(async_mode=mode)
    values, kept = tensors(1), {}
    for step in range(1, 4):
        kept[step] = copied(values)
        first.save(step, values, {"step": step})
        first.before_update()
        for value in values.values():
            value.add_(1)
        released.set()
        first.wait()
        if mode != "disabled":
            released.clear()
    released.set()
    for step, value in kept.items():
        assert same(loaded(first, step), value)


def test_state_is_taken_at_the_call(manager: Make) -> None:
    state = {"position": [1]}
    first = manager(async_mode="async")
    first.save(1, tensors(), state)
    state["position"][0] = 2
    found = first.find()
    assert found is not None and found.state == {"position": [1]}


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json", "config.toml", "manifest.json"])
@pytest.mark.parametrize("damage", ["remove", "halve", "flip"])
def test_the_newest_whole_one_is_taken(
    manager: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: str
) -> None:
    first = manager()
    first.save(5, tensors(5), {})
    first.save(10, tensors(10), {})
    (first.folder / "step-15").mkdir()
    path = first.folder / "step-10" / file
    content = path.read_bytes()
    path.unlink()
    if damage == "halve":
        path.write_bytes(content[: len(content) // 2])
    if damage == "flip":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with caplog.at_level(logging.WARNING, "titanlike"):
        assert same(loaded(manager()), tensors(5))
    said = [record.getMessage() for record in caplog.records if record.name == "titanlike"]
    assert any("step-10" in one and file in one and "skipped" in one for one in said)
    assert any("step-15" in one and "skipped" in one for one in said)
    with pytest.raises(CheckpointError, match=rf"step 10 .*not complete[^$]*{file}"):
        manager().find(10)
    with pytest.raises(CheckpointError, match=r"step 15 .*not complete"):
        manager().find(15)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 .*steps: 15, 10, 5"):
        manager().find(7)


def test_nothing_whole_left_is_an_error_but_a_first_save_cut_short_is_not(
    manager: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = manager()
    (first.folder / "step-1").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "titanlike"):
        assert first.find() is None
    assert "no save ever finished here" in caplog.text and "step-1" in caplog.text
    first.save(5, tensors(), {})
    (first.folder / "step-5" / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"at least one was and is damaged now[^$]*state\.json"):
        manager().find()


def test_going_back_names_what_lies_ahead(manager: Make, caplog: pytest.LogCaptureFixture) -> None:
    first = manager()
    first.save(1, tensors(1), {})
    first.save(2, tensors(2), {})
    with caplog.at_level(logging.WARNING, "titanlike"):
        assert same(loaded(first, 1), tensors(1))
    assert "step-2" in caplog.text and "move them away" in caplog.text


@pytest.mark.parametrize("mode", MODES[:2])
def test_keeping_one_there_is_never_none(manager: Make, mode: str) -> None:
    """A watcher counts complete checkpoints every few milliseconds."""
    first = manager(async_mode=mode, keep_latest_k=1)
    first.save(1, tensors(), {})
    first.wait()
    counts, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            # A removal may begin while the watcher looks; the successor is complete by then, so look again.
            counts.append(len(complete_steps(first.folder)) or len(complete_steps(first.folder)))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in (2, 3, 4, 5, 5, 11):
        first.save(step, tensors(step), {})
        first.wait()
        assert complete_steps(first.folder) == [step]
    manager().save(11, tensors(12), {})  # another run of the program saves the same step anew
    done.set()
    watcher.join()
    assert min(counts) == 1
    assert same(loaded(manager()), tensors(12))
    assert [path.name for path in first.folder.iterdir()] == ["step-11"]


def test_a_step_is_written_once(manager: Make) -> None:
    first = manager()
    first.save(3, tensors(1), {})
    before = (first.folder / "step-3" / "manifest.json").stat().st_mtime_ns
    first.save(3, tensors(1), {}, final=True)
    second = manager()
    assert same(loaded(second), tensors(1))
    second.save(3, tensors(1), {}, final=True)
    assert (first.folder / "step-3" / "manifest.json").stat().st_mtime_ns == before


def test_saves_are_ordered_and_the_final_one_is_waited_for(manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[int, str]] = []

    def slow(phase: str, step: int) -> None:
        events.append((step, phase))
        time.sleep(0.1)

    monkeypatch.setattr(storage, "fault", slow)
    first = manager(async_mode="async")
    start = time.perf_counter()
    first.save(1, tensors(1), {})
    assert time.perf_counter() - start < 0.1
    first.save(2, tensors(2), {})
    assert complete_steps(first.folder) == [1]
    first.save(3, tensors(3), {}, final=True)
    assert complete_steps(first.folder) == [3, 2, 1]
    assert [step for step, _ in events] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("hook", [1, 2])
def test_a_failed_background_save_shows_at_the_next_call_and_leaves_the_last_one(
    manager: Make, monkeypatch: pytest.MonkeyPatch, hook: int
) -> None:
    """The disk fails before the tensors (hook 1) or before the manifest (hook 2)."""
    first = manager(async_mode="async")
    first.save(1, tensors(1), {})
    first.wait()
    calls = iter(range(1, 9))

    def fail(phase: str, step: int) -> None:
        if next(calls) == hook:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(storage, "fault", fail)
    first.save(2, tensors(2), {})
    with pytest.raises(CheckpointError, match=r"step-2 failed on rank 0: .*No space left.* bytes are free at"):
        first.save(3, tensors(3), {})
    assert [path.name for path in first.folder.iterdir()] == ["step-1"]
    first.save(2, tensors(2), {})  # the failure was told; the same step may be tried again
    first.wait()
    assert same(loaded(first), tensors(2))


def test_a_full_disk_is_named_with_its_free_space(manager: Make) -> None:
    """A limit on the size of files stands for the full disk."""
    first = manager()
    first.save(1, tensors(1), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(CheckpointError, match=r"saving .*step-2 failed on rank 0.* bytes are free at"):
            first.save(2, {"large": torch.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in first.folder.iterdir()] == ["step-1"]
    assert same(loaded(first), tensors(1))


def test_a_fault_of_ours_stays_one(manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(phase: str, step: int) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(storage, "fault", bug)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        manager().save(1, tensors(), {})


def test_an_unwritable_place_is_a_checkpoint_error(manager: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        manager(tmp_path / "file" / "checkpoints").save(1, tensors(), {})


def test_files_that_vanish_under_retention_are_no_failure(manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = manager(keep_latest_k=1)
    first.save(1, tensors(), {})
    really = folders.inspect

    def vanish(path: Path, **options: bool) -> folders.StepFolder:
        seen = really(path, **options)
        if path.name == "step-1":
            shutil.rmtree(path, ignore_errors=True)
        return seen

    monkeypatch.setattr(folders, "inspect", vanish)
    first.save(2, tensors(), {})
    assert complete_steps(first.folder) == [2]


def test_what_does_not_fit_is_named_before_anything_is_touched(manager: Make) -> None:
    first = manager()
    first.save(1, tensors(1), {})
    found = first.find()
    assert found is not None
    values = {name: torch.full_like(value, 9) for name, value in tensors().items()}
    before = copied(values)
    with pytest.raises(CheckpointError, match=r"step-1: has no tensor named new\.one"):
        first.load(found, {**values, "new.one": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"count: saved \(1,\), here \(2,\)"):
        first.load(found, {**values, "count": torch.zeros(2)})
    assert same(values, before)


def test_another_dtype_is_converted_and_said(manager: Make, caplog: pytest.LogCaptureFixture) -> None:
    first = manager()
    first.save(1, tensors(1), {})
    found = first.find()
    assert found is not None
    into = {"layers.0.bias": torch.zeros(3)}
    with caplog.at_level(logging.WARNING, "titanlike"):
        first.load(found, into)
    assert torch.equal(into["layers.0.bias"], tensors(1)["layers.0.bias"].float())
    assert "layers.0.bias (torch.bfloat16 to torch.float32)" in caplog.text


@pytest.mark.parametrize("name", ["layers.0._orig_mod.weight", "layers._checkpoint_wrapped_module.0.weight"])
def test_names_of_wrappers_are_never_saved(manager: Make, name: str) -> None:
    with pytest.raises(AssertionError, match="wrapper names"):
        manager().save(1, {name: torch.zeros(1)}, {})


def test_state_must_be_json(manager: Make) -> None:
    first = manager()
    with pytest.raises(TypeError, match="not JSON serializable"):
        first.save(1, tensors(), {"tensor": torch.zeros(1)})
    assert not first.folder.exists()


def test_checksums_can_be_switched_off(manager: Make) -> None:
    first = manager(verify_checksums=False)
    first.save(1, tensors(1), {})
    path = first.folder / "step-1" / "config.toml"
    path.write_text("b = 1\n")
    assert first.find() is not None
    path.write_text("longer than it was")
    with pytest.raises(CheckpointError, match=r"config\.toml: 18 bytes, should have 6"):
        first.find()


def test_a_tool_without_a_process_group_can_read(manager: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    manager().save(4, tensors(4), STATE)
    folder, step = folders.locate(manager().folder)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    found = loading.find(folder, step, None)
    assert found is not None and found.state == json.loads(json.dumps(STATE))
    values = {name: torch.full_like(value, 9) for name, value in tensors().items()}
    loading.load(found.path, values, None)
    assert same(values, tensors(4))
