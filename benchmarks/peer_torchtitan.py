"""torchtitan 0.3 on CPU (gloo): its own trainer, timed from step to step.

What has to be changed from outside for it to run on CPU is all here: the device type, the memory statistics that its
metrics ask for, gloo's barrier, and its scaled-dot-product attention instead of flex (no backward on CPU).
"""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path

import common as c

settings = c.arguments()

import torch  # noqa: E402 (after the number of threads is set)

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *a: "cpu"
torch.cpu.get_device_properties = lambda *a: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda *a: {}
torch.cpu.reset_peak_memory_stats = lambda *a: None
torch.cpu.empty_cache = lambda: None
torch.cpu.current_device = lambda: 0
_barrier = torch.distributed.barrier
torch.distributed.barrier = lambda group=None, async_op=False, device_ids=None: _barrier(group, async_op)
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group=None: None
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", str(c.free_port()))


def model_spec():
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    spec = llama3.model_registry("debugmodel")
    normal = {"weight": lambda w: torch.nn.init.normal_(w, std=0.02)}
    layers = llama3._build_llama3_layers(
        n_layers=c.LAYERS,
        dim=c.DIM,
        n_heads=c.HEADS,
        n_kv_heads=c.KV_HEADS,
        hidden_dim=c.FFN,
        fuse_qkv=True,
        attn_backend="flex",
        rope=ComplexRoPE.Config(dim=c.DIM // c.HEADS, max_seq_len=4096, theta=c.ROPE_THETA),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.model = llama3.Llama3Model.Config(
        dim=c.DIM,
        vocab_size=c.VOCAB,
        layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=c.VOCAB, embedding_dim=c.DIM, param_init=normal),
        norm=RMSNorm.Config(normalized_shape=c.DIM, param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=c.DIM, out_features=c.VOCAB, param_init=normal),
    )
    return spec


def trainer(folder: Path):
    import datasets
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.trainer import Trainer

    texts = [c.text(row) for row in c.rows(c.ROWS * settings.steps, c.SEQ - 1)]  # it adds <s> and </s>
    text_datasets.DATASETS["rows"] = DatasetConfig(
        path="",
        loader=lambda path: datasets.Dataset.from_dict({"text": texts}),
        sample_processor=lambda sample: sample["text"],
    )
    return Trainer.Config(
        model_spec=model_spec(),
        hf_assets_path=str(c.write_tokenizer(folder / "tokenizer")),
        dump_folder=str(folder),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=c.VOCAB)),  # its default
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=c.ROWS,
            seq_len=c.SEQ,
            steps=settings.steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32" if settings.dtype == "fp32" else "bfloat16",
        ),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="rows"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=bool(settings.compile)),
    ).build()


def main() -> None:
    torch.set_num_threads(settings.threads)
    meter = c.Meter("torchtitan", settings)
    with tempfile.TemporaryDirectory() as folder:
        titan = trainer(Path(folder))
        log, step, losses = titan.metrics_processor.log, titan.train_step, []

        def logged(number, loss, *args, **kwargs):
            losses.append(loss)
            return log(number, loss, *args, **kwargs)

        def stepped(batches):
            if not losses:
                meter.start()
            step(batches)
            meter.step(c.ROWS * c.SEQ, losses[-1])

        titan.metrics_processor.log, titan.train_step = logged, stepped
        titan.train()
        titan.close()
    torch.distributed.destroy_process_group()
    meter.report()


if __name__ == "__main__":
    main()
