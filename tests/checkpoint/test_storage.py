"""Nothing that is read can run; nothing damaged is read; other programs' DCP folders are."""

import os
import pickle
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titanlike.checkpoint import command, manifest, storage
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.errors import CheckpointError

Make = Callable[..., CheckpointManager]
FILES = (".metadata", "__0_0.distcp", "state.json", "config.toml", "manifest.json")


class Marker:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def values(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"layers.0.weight": torch.full((4, 3), float(fill)), "output.weight": torch.full((5, 4), float(fill))}


def replace(path: Path, content: bytes, *, sign: bool) -> None:
    """Put other content in a checkpoint's file; `sign`: an attacker who makes the manifest fit."""
    path.write_bytes(content)
    if sign and path.name != manifest.NAME:
        old = manifest.read(path.parent)
        record = manifest.FileRecord(path.name, len(content), zlib.crc32(content))
        manifest.write(path.parent, manifest.Manifest(old.step, {**old.files, path.name: record}))


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_place_of_any_file_never_runs(manager: Make, tmp_path: Path, file: str, sign: bool) -> None:
    first = manager()
    first.save(1, values(), {})
    path = first.folder / "step-1"
    marker = tmp_path / "marker"
    replace(path / file, pickle.dumps(Marker(marker)), sign=sign)
    into = values(0)

    def resume() -> None:
        found = first.find()
        assert found is not None
        first.load(found, into)

    if sign and file == "config.toml":  # text that nothing here interprets
        resume()
    else:
        with pytest.raises(CheckpointError, match=re.escape(file)):
            resume()
        assert not any(value.any() for value in into.values())
        (problem,) = command.verify(path)
        assert file in problem
    if not (sign and file in ("config.toml", "state.json")):  # for weights alone the state isn't read
        with pytest.raises(CheckpointError, match=re.escape(file)):
            first.load_foreign(path, into)
    assert not marker.exists()


def test_the_pickle_would_have_run(tmp_path: Path) -> None:
    """Otherwise the test above shows nothing."""
    pickle.loads(pickle.dumps(Marker(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "functools.partial"])
def test_the_index_refuses_names_that_it_does_not_need(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b".")
    with pytest.raises(CheckpointError, match=rf"\.metadata: .*asks for {name}, .*refused"):
        storage.read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([1] * 9)[:-3]])
def test_an_index_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        storage.read_metadata(tmp_path)


def test_an_index_can_not_point_outside_its_folder(manager: Make) -> None:
    first = manager()
    first.save(1, values(), {})
    path = first.folder / "step-1" / ".metadata"
    content = path.read_bytes()
    assert content.count(b"__0_0.distcp") == 1
    path.write_bytes(content.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./secret', which is not a file of this folder"):
        storage.read_metadata(path.parent)


def test_every_random_damage_is_found_and_named(manager: Make) -> None:
    first = manager()
    first.save(1, {"weight": torch.arange(2000.0)}, {"counters": {"tokens": 5}})
    path = first.folder / "step-1"
    contents = {file: (path / file).read_bytes() for file in FILES}
    generator = random.Random(0)
    for number in range(200):
        file = FILES[number % len(FILES)]
        bad = bytearray(contents[file])
        place = generator.randrange(len(bad))
        if number % 4:
            bad[place] ^= 1 << generator.randrange(8)
        else:
            del bad[place:]
        (path / file).write_bytes(bad)
        problems = command.verify(path)
        assert len(problems) == 1 and str(path / file) in problems[0], (number, problems)
        (path / file).write_bytes(contents[file])
    assert command.verify(path) == []


# ---- other programs' folders ---------------------------------------------------------------------------------------


def foreign(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """What TorchTitan writes: tensors by name, optimizer state nested, and objects that DCP pickles."""
    weights = {name: torch.randn_like(value) for name, value in values().items()}
    state = {
        **{prefix + name: value for name, value in weights.items()},
        "optimizer": {
            "state": {name: {"exp_avg": value * 0, "step": torch.tensor(3.0)} for name, value in weights.items()}
        },
        "lr_scheduler": {"base_lrs": [1e-3], "last_epoch": 3},
        "train_state": Objects(),
    }
    dcp.save(state, checkpoint_id=path)
    return weights


class Objects:
    """Stands for TorchTitan's Stateful parts; reading it back would run torch.load without weights_only."""

    def __reduce__(self) -> tuple:
        return os.getpgrp, ()


@pytest.mark.parametrize("prefix", ["", "model."])
def test_foreign_weights_are_read_and_objects_stay_closed(
    group: None, manager: Make, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = foreign(tmp_path / "theirs", prefix)
    monkeypatch.setattr(os, "getpgrp", lambda: pytest.fail("an object was unpickled"))
    into = values(0)
    manager().load_foreign(tmp_path / "theirs", into)
    assert all(torch.equal(into[name], weights[name]) for name in weights)


def test_foreign_names_and_shapes_that_differ_are_named(group: None, manager: Make, tmp_path: Path) -> None:
    weights = foreign(tmp_path / "theirs")
    first, path = manager(), tmp_path / "theirs"
    into = {**values(0), "norm.weight": torch.zeros(3), "output.weight": torch.zeros(7, 4)}
    with pytest.raises(CheckpointError, match=r"theirs: has no tensor named norm\.weight"):
        first.load_foreign(path, into)
    with pytest.raises(CheckpointError, match=r"output\.weight: saved \(5, 4\), here \(7, 4\)"):
        first.load_foreign(path, into, exclude=["norm.*"])
    first.load_foreign(path, into, exclude=["norm.*", "output.*"])
    assert torch.equal(into["layers.0.weight"], weights["layers.0.weight"])
    assert not into["output.weight"].any()
    with pytest.raises(CheckpointError, match="has no tensor named train_state"):
        first.load_foreign(path, {"train_state": torch.zeros(1)})


def test_foreign_folders_that_are_none_get_a_hint(manager: Make, tmp_path: Path) -> None:
    first = manager()
    first.save(4, values(), {})
    with pytest.raises(CheckpointError, match=r"no DCP checkpoint.* did you mean .*step-4\?"):
        first.load_foreign(first.folder, values())
    with pytest.raises(CheckpointError, match=r"nowhere: no DCP checkpoint"):
        first.load_foreign(tmp_path / "nowhere", values())
    into = values(0)
    first.load_foreign(first.folder / "step-4", into)  # one of ours, of another run
    assert torch.equal(into["output.weight"], values()["output.weight"])


def test_a_foreign_folder_with_a_damaged_file_names_it(group: None, manager: Make, tmp_path: Path) -> None:
    foreign(tmp_path / "theirs")
    file = tmp_path / "theirs" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: can't be read: "):
        manager().load_foreign(tmp_path / "theirs", values())


def test_others_can_read_ours(manager: Make) -> None:
    """The tensors are plain DCP: torch's own reader takes them."""
    first = manager()
    first.save(1, values(2), {})
    into = values(0)
    dcp.load(into, checkpoint_id=first.folder / "step-1")
    assert torch.equal(into["layers.0.weight"], values(2)["layers.0.weight"])
