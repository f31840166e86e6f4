"""titanlike's own trainer on the comparison's model: loader, loop, metrics and all, timed from batch to batch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import common as c

settings = c.arguments()

from titanlike.train import wait_shortly  # noqa: E402

os.environ.update(wait_shortly(os.environ))

import torch  # noqa: E402 (after the number of threads is set)

from titanlike.config import Config  # noqa: E402
from titanlike.trainer import Trainer  # noqa: E402


def config(folder: Path) -> Config:
    text = folder / "words.jsonl"
    rows = c.rows(settings.steps * c.ROWS * (c.SEQ + 1) // 1000 + 1, 1000)
    text.write_text("".join(json.dumps({"text": c.text(row)}) + "\n" for row in rows))
    sizes = {
        "dim": c.DIM,
        "n_layers": c.LAYERS,
        "n_heads": c.HEADS,
        "n_kv_heads": c.KV_HEADS,
        "ffn_dim": c.FFN,
        "vocab_size": c.VOCAB,
        "rope_theta": c.ROPE_THETA,
    }
    return Config.model_validate(
        {
            "job": {"dump_folder": str(folder / "run")},
            "model": {"hf_assets_path": str(c.write_tokenizer(folder)), "overrides": sizes},
            # One document a row, as the plain loop sees it.
            "data": {"path": [str(text)], "document_mask": False, "cache_folder": str(folder / "cache")},
            "training": {
                "seq_len": c.SEQ,
                "local_batch_size": c.ROWS,
                "steps": settings.steps,
                "mixed_precision_param": "bfloat16" if settings.dtype == "bf16" else "float32",
            },
            "optimizer": {"lr": 3e-4, "weight_decay": 0.1},
            "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
            "compile": {"enable": bool(settings.compile)},
            "checkpoint": {"enable": False},
            "metrics": {"log_freq": 1},
        }
    )


class Timed(Trainer):
    """Reports to the meter whenever a step is complete, metrics included."""

    meter = c.Meter("titanlike", settings)
    loss = 0.0

    def _next_batch(self, step):
        if step == 1:
            self.meter.start()
        return super()._next_batch(step)

    def _report(self, step, batch, row):
        super()._report(step, batch, row)
        self.loss = row["loss"]

    def _collect_garbage(self, step):
        super()._collect_garbage(step)
        self.meter.step(c.ROWS * c.SEQ, self.loss)


def main() -> None:
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as folder:
        stdout, sys.stdout = sys.stdout, sys.stderr  # the console's lines are not the result
        trainer = Timed(config(Path(folder)))
        trainer.run()
        sys.stdout = stdout
        trainer.meter.report()


if __name__ == "__main__":  # loader and tokenizer workers import this module
    main()
