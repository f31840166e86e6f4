"""The small pretrained model and some text, for what is measured on them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from titanlike.rollout.trained import load_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/assets/models/aidreams260K"
TEXTS = ROOT / "titanlike/assets/c4_test.jsonl.gz"


def texts(count: int) -> list[str]:
    with gzip.open(TEXTS, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line, _ in zip(lines, range(count), strict=False)]


def ours(seq_len: int | None = None):
    """(model, tokenizer)."""
    return load_model(FOLDER, seq_len)[:2]
