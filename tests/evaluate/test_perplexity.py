"""Perplexity against transformers' model, window by window; fp32, losses to 1e-6 relative."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

from tests.evaluate.models import FOLDER, TEXTS, ours, texts
from titanlike.cli import main
from titanlike.errors import DataError
from titanlike.evaluate.perplexity import Window, perplexity
from titanlike.evaluate.scoring import Passage, score

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def theirs():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def reference(model, documents: list[list[int]], length: int, stride: int) -> tuple[int, float]:
    """(scored tokens, sum of their losses): every window by itself, all but the newest tokens masked."""
    count, total = 0, 0.0
    for ids in documents:
        done = 1
        for end in [min(length, len(ids)), *range(length + stride, len(ids) + stride, stride)]:
            end = min(end, len(ids))
            window = torch.tensor([ids[max(0, end - length) : end]])
            fresh = end - done
            if fresh <= 0:
                continue
            with torch.no_grad():
                logits = model(window).logits[0, :-1]
            total += F.cross_entropy(logits[-fresh:], window[0, -fresh:], reduction="sum").item()
            count, done = count + fresh, end
    return count, total


@pytest.mark.parametrize(("length", "stride"), [(64, 63), (64, 16), (128, 127)])
def test_loss_equals_transformers(theirs, length, stride):
    model, tokenizer = ours()
    documents = texts(6)
    found = perplexity(
        model, tokenizer, documents, Window(length=length, stride=stride), add_bos=True, batch_tokens=200
    )
    ids = [tokenizer.encode(text, add_bos=True, add_eos=False) for text in documents]
    count, total = reference(theirs, ids, length, stride)
    assert found.tokens == count == sum(len(one) - 1 for one in ids)
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    size = sum(len(text.encode()) for text in documents)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-3)


def test_the_first_window_only(theirs):
    model, tokenizer = ours()
    window = Window(length=32, stride=31, first_only=True)
    found = perplexity(model, tokenizer, texts(5), window, add_bos=False, batch_tokens=10_000)
    ids = [tokenizer.encode(text, add_bos=False, add_eos=False)[:32] for text in texts(5)]
    count, total = reference(theirs, ids, 32, 31)
    assert (found.documents, found.tokens) == (5, count)
    assert found.loss == pytest.approx(total / count, rel=1e-6)


def test_batches_change_nothing():
    model, tokenizer = ours()
    window = Window(length=48, stride=40)
    few, many = (
        perplexity(model, tokenizer, texts(4), window, add_bos=True, batch_tokens=size) for size in (1, 100_000)
    )
    assert few.tokens == many.tokens
    assert few.loss == pytest.approx(many.loss, rel=1e-6)


def test_every_token_is_scored_once_in_windows():
    for n in range(1, 40):
        for length, stride in ((2, 1), (8, 7), (8, 3), (50, 49)):
            found = [
                token
                for passage in Window(length=length, stride=stride).passages(range(n))
                for token in passage.tokens[passage.known :]
            ]
            assert found == list(range(1, n)), (n, length, stride)


def test_greedy_and_passages_of_one_token():
    model, _ = ours()
    likeliest = [1]
    for _ in range(4):
        likeliest.append(model.logits(model(torch.tensor([likeliest])))[0, -1].argmax().item())
    passages = [Passage(tokens=likeliest, known=2), Passage(tokens=[1]), Passage(tokens=[1, 7, 9], known=1)]
    right, empty, wrong = score(model, passages, batch_tokens=100, greedy=True)
    assert right.greedy and len(right.logprobs) == 3
    assert empty.greedy and len(empty.logprobs) == 0
    assert not wrong.greedy
    plain = [one.logprobs for one in score(model, passages, batch_tokens=100)]
    torch.testing.assert_close(plain[0], right.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plain[2], wrong.logprobs, rtol=1e-6, atol=1e-6)


def test_nothing_to_score():
    model, tokenizer = ours()
    with pytest.raises(DataError, match="nothing to score"):
        perplexity(model, tokenizer, [""], Window(length=8, stride=7), add_bos=True, batch_tokens=10)
    with pytest.raises(ValueError, match="at least one"):
        Passage(tokens=[1, 2], known=0)


def test_command(capsys):
    assert main(["evaluate", str(FOLDER), "--file", str(TEXTS), "--documents", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["seq_len"], found["stride"]) == (3, 128, 127)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert main(["evaluate", str(FOLDER), "--file", str(TEXTS), "--documents", "3"]) == 0
    assert f"perplexity {found['perplexity']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--file", "nosuch.jsonl"], 3, "--file = 'nosuch.jsonl': no such file"),
        (["--dataset", "c5"], 2, "c5"),
        (
            ["--file", str(TEXTS), "--seq-len", "64", "--stride", "64"],
            2,
            "--stride 64: must be less",
        ),
        (["--file", str(TEXTS), "--text-column", "body"], 3, "no field 'body' (--text-column)"),
    ],
)
def test_what_it_says_of_mistakes(capsys, argv, code, words):
    assert main(["evaluate", str(FOLDER), *argv]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--file", "x", "--seq-len", "1"], ["--tasks", "x", "--limit", "0"]])
def test_usage(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(FOLDER), *argv])
    assert stopped.value.code == 2
    capsys.readouterr()


def test_tasks_need_their_extra(capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "titanlike.evaluate.harness", raising=False)
    assert main(["evaluate", str(FOLDER), "--tasks", "arc_easy"]) == 2
    assert "pip install 'titanlike[eval]'" in capsys.readouterr().err
