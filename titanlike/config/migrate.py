"""`titanlike config import`: a TorchTitan file under our names, with every default that means something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlike.config.dump import write_tables
from titanlike.config.files import read_file
from titanlike.config.layers import MISSING, Layer
from titanlike.config.load import build
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key
from titanlike.errors import ConfigError


@dataclass(frozen=True)
class Difference:
    """A default (key left out) that means something else here, and what to write for TorchTitan's meaning."""

    key: str
    theirs: str
    ours: str
    keep: str
    """The line that gives TorchTitan's meaning; empty where none does."""


DIFFERENCES = (
    Difference("checkpoint.enable", "no checkpoints", "checkpoints are saved and resumed from", "false"),
    Difference("checkpoint.folder", 'folder "checkpoint"', 'folder "checkpoints"', '"checkpoint"'),
    Difference(
        "checkpoint.last_save_model_only",
        "the last checkpoint holds weights alone and can't be resumed",
        "the last checkpoint is whole; true writes the weights alone as well, under exports/",
        "",
    ),
    Difference("metrics.save_tb_folder", 'folder "tb"', 'folder "tensorboard"', '"tb"'),
    Difference("profiling.save_traces_folder", 'folder "profile_traces"', 'folder "profiles"', '"profile_traces"'),
    Difference("activation_checkpoint.mode", "selective, every second block", "none", '"selective"'),
    Difference(
        "optimizer.no_decay",
        "weight decay on every parameter",
        "no weight decay on norms, biases and embeddings",
        "[]",
    ),
    Difference("debug.seed", "a new seed each run", "seed 0: the same run twice is the same", ""),
    Difference(
        "data.document_mask",
        "attention crosses the documents of a sequence",
        "attention stays inside a document, and positions restart",
        "false",
    ),
    Difference("data.shuffle", "documents in the order of the files", "documents and sequences permuted", "false"),
    Difference("data.dataset", "c4_test", "the text that ships", '"c4_test"'),
    Difference("validation.dataset", "c4_validation", "held out by data.validation_fraction", '"c4_validation"'),
    Difference("validation.seq_len", "2048", "training.seq_len", "2048"),
    Difference("loss.implementation", "a table of logits", "in chunks of tokens: same loss, less memory", '"logits"'),
    Difference("model.hf_assets_path", "./tests/assets/tokenizer", "the tokenizer that ships", ""),
)

# The part of the default that isn't a key.
ALWAYS = (
    "the loss is one mean over the trained tokens of the global batch, not a mean of the ranks' means",
    "an epoch is every document once, whatever the number of ranks; a restart goes on in the same order",
    "initial weights depend on the seed and not on the layout; no seed checkpoint is needed",
)


def import_torchtitan(name: str) -> tuple[str, list[str]]:
    """The translated file, and notes on what means something else. Raises ConfigError with all that can't be kept."""
    problems: list[str] = []
    layer = read_file(name, problems)
    _, found = build(layer)
    if problems or found:
        raise ConfigError(problems + found)
    notes = notes_on(layer)
    head = [f"Translated from {name} of TorchTitan. What means something else here:", *(f"- {note}" for note in notes)]
    comment = "\n".join(f"# {line}" for line in head)
    return f"{comment}\n\n{write_tables(_ordered(layer.values))}", notes


def notes_on(layer: Layer) -> list[str]:
    """What the file's own keys, and the keys it leaves out, mean here and didn't there."""
    notes = [_note(d) for d in DIFFERENCES if layer.get(tuple(d.key.split("."))) is MISSING]
    if layer.get(("checkpoint", "last_save_model_only")) is True:
        notes.append(
            "checkpoint.last_save_model_only = true writes weights alone under exports/ as well; "
            "the last checkpoint stays resumable"
        )
    if layer.get(("training", "max_norm")) in (0, 0.0):
        notes.append("training.max_norm = 0 switches clipping off (there it scaled every gradient to zero)")
    if layer.get(("model", "flavor")) in ("debugmodel", MISSING):
        notes.append(
            'model.flavor = "debugmodel" is a smaller model here; for TorchTitan\'s write [model.overrides] '
            "dim = 256, n_layers = 6, n_heads = 16, n_kv_heads = 16, head_dim = 16, ffn_dim = 768, vocab_size = 2048, "
            "rope_theta = 500000"
        )
    return notes + list(ALWAYS)


def _note(difference: Difference) -> str:
    keep = f"; {difference.key} = {difference.keep} keeps that" if difference.keep else ""
    return f"{difference.key}: there {difference.theirs}{keep}; here {difference.ours}"


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """Sections in the order of the schema."""
    order = {name: n for n, name in enumerate(fields_by_key(Config))}
    return dict(sorted(values.items(), key=lambda item: order[item[0]]))
