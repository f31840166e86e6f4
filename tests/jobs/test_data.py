"""Data through whole runs: ends of epochs, held-out documents on uneven ranks, documents without text."""

import json

import pytest

from tests.jobs import inspections
from tests.jobs.jobs import curve, lines
from titanlike.data.tokenizers import load_tokenizer

RUN = "tests.jobs.jobs:run"


def go(pool, config, world=1, **options):
    return pool.run(RUN, world=world, group=False, config=config, **options)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(path)]


def text_of(tokens: int, word: str = "doc") -> str:
    """A text of so many tokens, BOS and EOS included."""
    tokenizer = load_tokenizer("debug")
    text = word
    while len(tokenizer.encode(text, True, True)) < tokens:
        text += " a"
    assert len(tokenizer.encode(text, True, True)) == tokens
    return text


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_at_ends_of_epochs(pool, tiny, tmp_path, world):
    """10 documents of one sequence each, 2 a step: stopped at steps 5 and 10; each pass is whole and in its order."""
    path = write(tmp_path / "ten.jsonl", [text_of(32, f"doc-{i:02d}") for i in range(10)])
    sections = {"data": {"path": path}, "training": {"steps": 15, "global_batch_size": 2, "local_batch_size": 1}}
    for stop in (5, 10):
        go(pool, tiny(tmp_path / "run", **sections), world, stop_at=stop)
    for name in ("run", "whole"):
        go(pool, tiny(tmp_path / name, **sections), world)
    documents = [
        [d for line in lines(tmp_path / name / "consumed.jsonl") for row in line["documents"] for d in row]
        for name in ("run", "whole")
    ]
    assert documents[0] == documents[1]
    passes = [documents[0][i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(one) == list(range(10)) for one in passes) and passes[0] != passes[1]
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_validation_on_two_ranks_is_the_mean_over_documents(pool, tiny, tmp_path):
    """5 documents in 3 rows: the second rank gets one of them and an empty one. Each document counts once."""
    held = [text_of(n) for n in (10, 22, 32, 5, 27)]
    sections = {
        "validation": {"enable": True, "path": write(tmp_path / "held.jsonl", held), "local_batch_size": 1},
        "training": {"steps": 1},
        "optimizer": {"lr": 1e-30},  # validated is after the step, and we know the values before it
    }
    want = inspections.mean_of_documents(tiny(tmp_path), held)
    for world in (1, 2):
        go(pool, tiny(tmp_path / str(world), **sections), world)
        (row,) = lines(tmp_path / str(world) / "metrics.jsonl")
        assert row["validation_loss"] == pytest.approx(want, rel=1e-5)


def test_documents_without_text_train_nothing_and_break_nothing(pool, tiny, tmp_path):
    texts = ["", " ", None, *(text_of(32, f"doc-{i}") for i in range(8)), ""]
    sections = {"data": {"path": write(tmp_path / "some.jsonl", texts)}, "training": {"steps": 2}}
    go(pool, tiny(tmp_path / "run", **sections), 2)
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [256, 512]
    assert all(0 < row["loss"] < 8 for row in rows)
