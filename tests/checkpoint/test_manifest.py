"""The manifest tells every byte that isn't as it was."""

import random
from pathlib import Path

import pytest

from titanlike.checkpoint import manifest
from titanlike.checkpoint.manifest import FileRecord, Manifest
from titanlike.errors import CheckpointError


def write(folder: Path, files: dict[str, bytes], step: int = 7) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    records = {
        name: FileRecord(name, len(content), manifest.file_crc32(folder / name)) for name, content in files.items()
    }
    written = Manifest(step, records, {"dp": 2}, {"tokens": 12}, {"time": "now"})
    manifest.write(folder, written)
    return written


def test_reads_what_was_written(tmp_path: Path) -> None:
    written = write(tmp_path, {"a": b"x" * 100, "__10_0.distcp": b"", "__2_0.distcp": b"1"})
    assert manifest.read(tmp_path) == written
    assert written.size == 101
    assert list(manifest.read(tmp_path).files) == ["__2_0.distcp", "__10_0.distcp", "a"]
    assert not (tmp_path / "manifest.json.tmp").exists()


def test_a_folder_without_one_never_finished(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no manifest\.json: the save never finished"):
        manifest.read(tmp_path)


def test_flipped_bits_of_the_manifest_are_seen(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"content"})
    path = tmp_path / manifest.NAME
    good = path.read_bytes()
    for bit in range(0, len(good) * 8, 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            manifest.read(tmp_path)
    path.write_bytes(good[:-3])
    with pytest.raises(CheckpointError, match="damaged"):
        manifest.read(tmp_path)


def test_every_damage_to_a_file_is_named(tmp_path: Path) -> None:
    written = write(tmp_path, {"a": bytes(range(256)) * 40, "b": b"", "c": b"123"})
    records = written.files.values()
    assert manifest.problems(tmp_path, records, checksums=True) == []
    generator = random.Random(0)
    good = (tmp_path / "a").read_bytes()
    for _ in range(50):
        bad = bytearray(good)
        bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        (tmp_path / "a").write_bytes(bad)
        assert manifest.problems(tmp_path, records, checksums=False) == []
        (problem,) = manifest.problems(tmp_path, records, checksums=True)
        assert str(tmp_path / "a") in problem and "damaged" in problem
    (tmp_path / "a").write_bytes(good[:-1])
    (tmp_path / "c").unlink()
    too_short, missing = manifest.problems(tmp_path, records, checksums=True)
    assert "10,239 bytes, should have 10,240" in too_short
    assert "missing" in missing and str(tmp_path / "c") in missing


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "a\\b"])
def test_a_manifest_can_not_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    manifest.write(tmp_path, Manifest(1, {name: FileRecord(name, 1, 1)}))
    with pytest.raises(CheckpointError, match="not in its own folder"):
        manifest.read(tmp_path)


def test_another_version_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "VERSION", 2)
    write(tmp_path, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="version 2; this program reads 'titanlike-checkpoint' version 1"):
        manifest.read(tmp_path)
