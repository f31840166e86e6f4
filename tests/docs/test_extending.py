"""The worked example of docs/extending.md: read off the page, trained on two processes, resumed, asked for text."""

from __future__ import annotations

import json

import pytest

from tests.docs.pages import BY_NAME as PAGE
from tests.docs.pages import blocks, write_named_files

OPTIONS = ["sums.toml", "--metrics.log_freq=1", "--training.global_batch_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extending")
    (module,) = blocks(PAGE["extending.md"], "python")
    (folder / "sums.py").write_text(module)
    write_named_files(PAGE["extending.md"], folder)
    return folder


@pytest.fixture(scope="module")
def run(pool, folder):
    """run(job, *argv) on ranks of the pool; the example has been trained to step 3 on two of them."""

    def go(job: str, *argv: str, world: int = 1):
        return pool.run(f"tests.docs.jobs:{job}", world=world, group=False, folder=str(folder), argv=list(argv))

    assert go("train", *OPTIONS, "--training.steps=3", world=2) == ["done", "done"]
    return go


def test_the_example_trains_resumes_and_generates(run, folder):
    assert run("train", *OPTIONS, "--training.steps=6") == ["done"]
    rows = [json.loads(line) for line in (folder / "outputs/sums/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    saved = (folder / "outputs/sums/checkpoints/step-6/manifest.json").read_text()
    assert json.loads(saved)["counters"]["step"] == 6
    prompt = ["outputs/sums", "--prompt", "12 + 13 =", "--max-new-tokens", "4"]
    assert run("generate", *prompt, "--import", "sums") == [0]


def test_a_checkpoint_imports_nothing_by_itself(run, folder, monkeypatch, capsys):
    """In this process, which doesn't know the example's names."""
    from titanlike.rollout.generate import main

    monkeypatch.chdir(folder)
    assert main(["outputs/sums", "--prompt", "1"]) == 2
    assert "--import sums" in capsys.readouterr().err
