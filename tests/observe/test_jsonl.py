import json
import math

import numpy as np
import pytest
import torch

from titanlike.observe.jsonl import JsonLines, drop_after, encode, read_jsonl


def write(path, *rows, tail=b""):
    path.write_bytes(b"".join(encode(row) for row in rows) + tail)


def test_floats_keep_every_bit(tmp_path):
    values = [0.1, 1 / 3, 5e-324, float(torch.tensor(1.1)), 2.0**70 / 3]
    lines = JsonLines(tmp_path / "m.jsonl")
    for value in values:
        lines.write({"loss": value})
    lines.close()
    assert [row["loss"].hex() for row in read_jsonl(tmp_path / "m.jsonl")] == [value.hex() for value in values]


def test_nonfinite_values_are_null_and_named():
    row = json.loads(encode({"loss": math.nan, "norm": -math.inf, "deep": {"a": [1.0, math.inf]}, "ok": 1}))
    assert row == {
        "loss": None,
        "norm": None,
        "deep": {"a": [1.0, None]},
        "ok": 1,
        "nonfinite": {"loss": "nan", "norm": "-inf", "deep.a.1": "inf"},
    }


def test_scalars_of_torch_and_numpy_are_numbers(tmp_path):
    row = {"a": torch.tensor(2.5), "b": np.float32(0.5), "c": np.int64(7), "d": True, "e": None, "path": tmp_path}
    assert json.loads(encode(row)) == {"a": 2.5, "b": 0.5, "c": 7, "d": True, "e": None, "path": str(tmp_path)}


@pytest.mark.parametrize("length", [1, 100, 70_000, 200_000])
def test_torn_last_line_is_skipped_by_readers_and_removed_by_writers(tmp_path, length):
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2}, tail=b'{"step": 3, "x": "' + b"y" * length)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]


def test_last_line_without_newline_is_kept_when_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, tail=b'{"step": 2}')
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


def test_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, tail=b'{"st')
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_drop_after_removes_later_steps_and_says_so(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, *({"step": step, "loss": 1 / step} for step in range(1, 8)), tail=b'{"step": 8')
    before = path.read_bytes().splitlines()
    dropped = drop_after(path, 5)
    assert (dropped.lines, dropped.damaged, dropped.last_step) == (2, 1, 7)
    assert path.read_bytes().splitlines() == before[:5], "the lines that stay are byte for byte those that were there"
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_drop_after_leaves_the_file_alone_when_there_is_nothing_to_drop(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 5})
    inode = path.stat().st_ino
    assert drop_after(path, 5).lines == 0
    assert path.stat().st_ino == inode
    assert drop_after(tmp_path / "absent.jsonl", 5).last_step == 0


def test_an_interrupted_drop_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    write(path, {"step": 1}, {"step": 2})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        drop_after(path, 1)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
