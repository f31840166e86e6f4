"""litgpt 0.5: its pretraining, timed from step to step. It always compiles: without --compile, torch.compile is off."""

from __future__ import annotations

import tempfile
from pathlib import Path

import common as c

settings = c.arguments()

import torch  # noqa: E402 (after the number of threads is set)

if not settings.compile:
    torch.compile = lambda model=None, **options: model if model is not None else (lambda function: function)

import lightning  # noqa: E402
from litgpt import pretrain  # noqa: E402
from litgpt.args import EvalArgs, TrainArgs  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.data import DataModule  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


class Rows(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None, **options):
        self.rows = torch.tensor(c.rows(c.ROWS * (settings.steps + 1), c.SEQ + 1))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=c.ROWS)

    def val_dataloader(self):
        return DataLoader(self.rows[: c.ROWS], batch_size=c.ROWS)


def main() -> None:
    torch.set_num_threads(settings.threads)
    meter = c.Meter("litgpt", settings)
    started = False

    class Cycle(pretrain.CycleIterator):
        def __next__(self):
            nonlocal started
            batch = super().__next__()
            if not started:
                started = True
                meter.start()
            return batch

    log = lightning.Fabric.log_dict

    def log_dict(self, metrics, step=None):
        if "loss" in metrics:
            meter.step(c.ROWS * c.SEQ, float(metrics["loss"]))
        return log(self, metrics, step)

    pretrain.CycleIterator, lightning.Fabric.log_dict = Cycle, log_dict
    pretrain.validate = lambda *args, **options: torch.tensor(0.0)
    pretrain.save_checkpoint = lambda *args, **options: None
    model = Config(
        name="peer",
        block_size=c.SEQ,
        vocab_size=c.VOCAB,
        padded_vocab_size=c.VOCAB,
        n_layer=c.LAYERS,
        n_head=c.HEADS,
        n_query_groups=c.KV_HEADS,
        n_embd=c.DIM,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=c.NORM_EPS,
        mlp_class_name="LLaMAMLP",
        intermediate_size=c.FFN,
    )
    with tempfile.TemporaryDirectory() as folder:
        pretrain.setup(
            "peer",
            model_config=model,
            out_dir=Path(folder),
            precision="32-true" if settings.dtype == "fp32" else "bf16-mixed",
            data=Rows(),
            train=TrainArgs(
                save_interval=None,
                log_interval=1,
                global_batch_size=c.ROWS,
                micro_batch_size=c.ROWS,
                max_tokens=settings.steps * c.ROWS * c.SEQ,
                max_norm=1.0,
                lr_warmup_steps=0,
                min_lr=3e-4,
                tie_embeddings=False,
            ),
            eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
            optimizer={
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
            },
            devices=1,
            logger_name="csv",
            seed=c.SEED,
        )
    meter.report()


if __name__ == "__main__":
    main()
