"""Which step folders there are, which are whole, which go. A checkpoint here is a manifest and one small file."""

import os
from pathlib import Path

import pytest

from titanlike.checkpoint import folders, manifest
from titanlike.checkpoint.manifest import FileRecord, Manifest
from titanlike.checkpoint.retention import expendable, prune
from titanlike.errors import CheckpointError


def complete(folder: Path, step: int, name: str | None = None) -> Path:
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"123")
    manifest.write(path, Manifest(step, {"data": FileRecord("data", 3, manifest.file_crc32(path / "data"))}))
    return path


def torn(folder: Path, step: int) -> Path:
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"12")
    return path


def damaged(folder: Path, step: int) -> Path:
    path = complete(folder, step)
    (path / "data").write_bytes(b"1")
    return path


def steps(folder: Path) -> list[int]:
    return [one.step for one in folders.scan(folder)]


def test_scan_orders_by_number_and_tells_what_is_whole(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        complete(tmp_path, step)
    torn(tmp_path, 11)
    damaged(tmp_path, 2)
    for other in ("step-", "step-01", "step-1x", "exports", "step-5.old"):
        (tmp_path / other).mkdir()
    (tmp_path / "step-77").write_text("a file, no folder")
    found = folders.scan(tmp_path)
    assert [(one.step, one.complete, one.torn) for one in found] == [
        (100, True, False),
        (11, False, True),
        (10, True, False),
        (9, True, False),
        (2, False, False),
    ]
    assert folders.scan(tmp_path / "nowhere") == []


def test_a_folder_under_another_steps_name_is_not_complete(tmp_path: Path) -> None:
    complete(tmp_path, 5).rename(tmp_path / "step-6")
    (found,) = folders.scan(tmp_path)
    assert not found.complete and "of step 5" in found.problems[0]


def test_retention_counts_by_number_whatever_the_dates(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11, 100, 1000):
        complete(tmp_path, step)
    for age, step in enumerate((1000, 100, 11, 10, 9, 8)):  # the highest step looks the oldest
        os.utime(tmp_path / f"step-{step}", (1e9 + age, 1e9 + age))
    assert prune(tmp_path, 2, 1000) == [8, 9, 10, 11]
    assert steps(tmp_path) == [1000, 100]


def test_retention_of_zero_keeps_all_and_below_zero_is_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        complete(tmp_path, step)
    assert prune(tmp_path, 0, 3) == []
    with pytest.raises(ValueError, match=r"keep_latest_k = -1"):
        prune(tmp_path, -1, 3)
    assert steps(tmp_path) == [3, 2, 1]


def test_retention_counts_complete_ones_only(tmp_path: Path) -> None:
    complete(tmp_path, 1)
    torn(tmp_path, 2)
    damaged(tmp_path, 3)
    complete(tmp_path, 4)
    torn(tmp_path, 5)
    damaged(tmp_path, 6)
    assert prune(tmp_path, 2, 4) == [2]  # the torn one before a complete one; nothing else
    assert steps(tmp_path) == [6, 5, 4, 3, 1]
    complete(tmp_path, 7)
    complete(tmp_path, 8)
    assert prune(tmp_path, 2, 8) == [1, 3, 4, 5, 6]
    assert steps(tmp_path) == [8, 7]


def test_retention_removes_nothing_where_nothing_is_complete(tmp_path: Path) -> None:
    torn(tmp_path, 1)
    damaged(tmp_path, 2)
    assert prune(tmp_path, 1, 2) == []
    assert steps(tmp_path) == [2, 1]


def test_retention_keeps_what_was_just_written_below_older_branches(tmp_path: Path) -> None:
    for step in (5, 6, 10, 20):
        complete(tmp_path, step)
    assert [one.step for one in expendable(folders.scan(tmp_path), 1, 6)] == [5, 10]


def test_a_removal_cut_short_leaves_no_false_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = complete(tmp_path, 1)
    monkeypatch.setattr(folders.shutil, "rmtree", lambda *_, **__: None)
    folders.remove(path)
    (left,) = folders.scan(tmp_path)
    assert left.torn
    folders.remove(path)  # what has vanished already is no error
    folders.remove(tmp_path / "step-99")


def test_a_torn_save_gives_way_and_a_complete_one_steps_aside(tmp_path: Path) -> None:
    path = torn(tmp_path, 3)
    folders.make_room(path)
    assert list(path.iterdir()) == []
    path.rmdir()
    complete(tmp_path, 3)
    folders.make_room(path)
    new, old = folders.scan(tmp_path)
    assert new.path == path and new.torn
    assert old.path.name == "step-3.replaced" and old.complete and old.step == 3
    folders.make_room(path)  # a second try, after a crash in the first: the complete one still waits
    assert folders.scan(tmp_path)[1].complete
    folders.withdraw(path)
    (back,) = folders.scan(tmp_path)
    assert back.path == path and back.complete
    folders.make_room(path)
    path.rmdir()
    complete(tmp_path, 3)
    folders.settle(path)
    assert [one.path.name for one in folders.scan(tmp_path)] == ["step-3"]


def test_locate_knows_a_run_a_folder_and_a_step(tmp_path: Path) -> None:
    complete(tmp_path / "run" / "checkpoints", 4)
    complete(tmp_path / "other" / "kept_here", 4)
    folder = tmp_path / "run" / "checkpoints"
    assert folders.locate(tmp_path / "run") == (folder, -1)
    assert folders.locate(folder) == (folder, -1)
    assert folders.locate(folder / "step-4") == (folder, 4)
    assert folders.locate(tmp_path / "other") == (tmp_path / "other" / "kept_here", -1)
    with pytest.raises(CheckpointError, match="no step-N folder"):
        folders.locate(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        folders.locate(tmp_path / "nowhere")
