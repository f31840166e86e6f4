"""Greedy continuations with our cache equal those of transformers, token for token: windows, soft caps, latents."""

from __future__ import annotations

import pytest
import torch

from tests.models.hub import models
from titanlike.rollout.sampling import Sampling, generate

transformers = pytest.importorskip("transformers")

CASES = ("llama", "mistral with a window", "qwen2, windows and yarn", "qwen3-moe", "deepseek-v3", "gemma2", "gemma3")


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(case, tmp_path):
    theirs = models.reference(case)
    theirs.save_pretrained(tmp_path)
    rows = models.tokens(3).tolist()
    prompts = [rows[0][:14], rows[1][:5], rows[2][:1]]  # longer and shorter than the windows
    got = generate(models.load(tmp_path), prompts, Sampling(max_new_tokens=20, temperature=0.0))
    for prompt, answer in zip(prompts, got, strict=True):
        row = torch.tensor([prompt])
        want = theirs.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert answer == want[0, len(prompt) :].tolist()
