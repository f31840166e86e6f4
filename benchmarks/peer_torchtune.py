"""torchtune 0.6.1: its full fine-tuning recipe over plain rows, timed from step to step. It has no mixed precision."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import common as c

settings = c.arguments()

import torch  # noqa: E402 (after the number of threads is set)
import torchtune  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

meter = c.Meter("torchtune", settings)


# ---- what the recipe's config names


class Tokenizer:
    pad_id, bos_id, eos_id, max_seq_len = c.PAD, c.BOS, c.EOS, c.SEQ


class Rows(torch.utils.data.Dataset):
    def __init__(self, tokenizer, packed=False):
        self.rows = c.rows(c.ROWS * settings.steps, c.SEQ)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i], "labels": list(self.rows[i])}


def model():
    from torchtune.models.llama3 import llama3

    return llama3(
        vocab_size=c.VOCAB,
        num_layers=c.LAYERS,
        num_heads=c.HEADS,
        num_kv_heads=c.KV_HEADS,
        embed_dim=c.DIM,
        max_seq_len=4096,
        intermediate_dim=c.FFN,
        rope_base=int(c.ROPE_THETA),
        norm_eps=c.NORM_EPS,
    )


class Checkpointer:
    def __init__(self, should_load_recipe_state=False, **options):
        pass

    def load_checkpoint(self):
        torch.manual_seed(c.SEED)
        made = model()
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        return {"model": made.state_dict()}

    def save_checkpoint(self, *args, **options):
        pass


class Logger:
    def log_config(self, config):
        pass

    def log_dict(self, payload, step):
        meter.step(c.ROWS * c.SEQ, float(payload["loss"]))

    def log(self, name, data, step):
        pass

    def close(self):
        pass


# ---- the run


def config(folder: str):
    here = "peer_torchtune"
    return OmegaConf.create(
        {
            "output_dir": folder,
            "model": {"_component_": f"{here}.model"},
            "tokenizer": {"_component_": f"{here}.Tokenizer"},
            "dataset": {"_component_": f"{here}.Rows"},
            "seed": c.SEED,
            "shuffle": False,
            "checkpointer": {"_component_": f"{here}.Checkpointer", "model_type": "LLAMA3"},
            "resume_from_checkpoint": False,
            "batch_size": c.ROWS,
            "epochs": 1,
            "max_steps_per_epoch": settings.steps,
            "gradient_accumulation_steps": 1,
            "optimizer": {
                "_component_": "torch.optim.AdamW",
                "lr": 3e-4,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
                "fused": True,
            },
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 0,
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "optimizer_in_bwd": False,
            "clip_grad_norm": 1.0,
            "compile": bool(settings.compile),
            "device": "cpu",
            "enable_activation_checkpointing": False,
            "enable_activation_offloading": False,
            "dtype": "fp32",
            "metric_logger": {"_component_": f"{here}.Logger"},
            "log_every_n_steps": 1,
            "log_peak_memory_stats": False,
        }
    )


def recipe():
    """The recipes' folder refuses to be imported as a package: one file of it is loaded by its path."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice


def main() -> None:
    if settings.dtype != "fp32":
        raise SystemExit("torchtune has no mixed precision")
    torch.set_num_threads(settings.threads)
    sys.modules["peer_torchtune"] = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder:
        run = recipe()(config(folder))
        run.setup(config(folder))
        run.save_checkpoint = lambda *args, **options: None
        meter.start()
        run.train()
    meter.report()


if __name__ == "__main__":
    main()
