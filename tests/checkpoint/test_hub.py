"""Exports: types, file modes, folders that are there, and the upload; with a stand-in for the Hub."""

from __future__ import annotations

import json
import os
import stat
from typing import ClassVar

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from titanlike.cli import main
from titanlike.config import load_config
from titanlike.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two steps whose routing biases have moved."""
    folder = tmp_path_factory.mktemp("run")
    argv = [
        f"--job.dump_folder={folder}",
        "--model.name=deepseek_v3",
        "--model.flavor=debugmodel",
        "--model.overrides.n_layers=2",
        "--model.overrides.dim=32",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.steps=2",
        "--data.dataset=debug",
        "--checkpoint.last_save_in_hf",
    ]
    Trainer(load_config(argv)).run()
    return folder


def test_the_end_of_a_run(run):
    exported = run / "exports" / "hf-step-2"
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["torch_dtype"] == "float32"
    assert {"README.md", "generation_config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    umask = os.umask(0)
    os.umask(umask)
    for path in exported.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path


def test_biases_of_routers_keep_their_type(run, tmp_path):
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    exact = load_file(run / "exports" / "hf-step-2" / "model.safetensors")
    narrow = load_file(tmp_path / "out" / "model.safetensors")
    assert exact.keys() == narrow.keys()
    biases = [name for name in exact if name.endswith("e_score_correction_bias")]
    assert biases and all(exact[name].any() for name in biases)
    for name, tensor in exact.items():
        want = tensor if name in biases else tensor.to(torch.bfloat16)
        assert narrow[name].dtype == want.dtype and torch.equal(narrow[name], want), name


def test_generating_uses_them(run, capsys):
    """From the checkpoint and from the export come the same tokens."""
    found = []
    for place in (run, run / "exports" / "hf-step-2"):
        assert main(["generate", str(place), "--prompt", "It was", "--max-new-tokens", "12", "--seed", "3"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_a_folder_that_is_there_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["checkpoint", "export", str(run), str(tmp_path)]) == 4
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert main(["checkpoint", "import", str(run / "exports" / "hf-step-2"), str(tmp_path / "in")]) == 0
    assert main(["checkpoint", "import", str(run / "exports" / "hf-step-2"), str(tmp_path / "in")]) == 4


class Recorder:
    """The Hub's client, as far as an upload uses it."""

    calls: ClassVar[list] = []

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path):
        self.calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))
        return f"https://huggingface.co/{repo_id}"


def test_upload(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Recorder)
    argv = ["checkpoint", "export", str(run), str(tmp_path / "out"), "--push-to-hub", "me/mine", "--private"]
    assert main(argv) == 0
    assert Recorder.calls[0] == ("create", "me/mine", True, True)
    assert Recorder.calls[1][:2] == ("upload", "me/mine") and "model.safetensors" in Recorder.calls[1][2]
    assert "https://huggingface.co/me/mine" in capsys.readouterr().out


def test_an_upload_that_fails_loses_nothing(run, tmp_path, capsys, monkeypatch):
    def create_repo(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(Recorder, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "HfApi", Recorder)
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--push-to-hub", "me/mine"]) == 4
    text = capsys.readouterr().err
    assert "is written, but not uploaded to 'me/mine': OSError: no network" in text and "hf upload" in text
    assert (tmp_path / "out" / "config.json").is_file()
