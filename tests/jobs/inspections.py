"""What the pool's ranks are asked to look at in the product's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from titanlike.checkpoint import storage
from titanlike.config import Config
from titanlike.data.tokenizers import load_tokenizer
from titanlike.launch import faults
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import decoder_spec


def built(config: dict[str, Any]):
    """A trainer that has loaded what there is, and the end of it."""
    from titanlike.trainer import Trainer

    trainer = Trainer(Config.model_validate(config))
    trainer.checkpoints.close()
    trainer.data.close()
    trainer.metrics.close()
    return trainer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def loaded(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, Any]:
    """Everything that a start has loaded, gathered: tensors by name, options of the optimizer's groups by parameter."""
    trainer = built(config)
    options = {
        name: {key: value for key, value in group.items() if key not in ("params", "names", "of")}
        for group in trainer.optimizer.param_groups
        for name in group["names"]
    }
    return {"tensors": {n: whole(t) for n, t in trainer._tensors().items()}, "options": options}


def garbage_in_buffers(rank: int, world: int, *, config: dict[str, Any]) -> list[str]:
    """Start with memory full of NaN: the buffers that are not, bit for bit, those of a model built on the CPU."""
    garbage = [torch.full((1 << n,), float("nan")) for n in range(4, 18) for _ in range(16)]
    del garbage
    trainer = built(config)
    settings = Config.model_validate(config)
    eager = dict(Decoder(decoder_spec(settings), seq_len=settings.training.seq_len).named_buffers())
    ours = dict(trainer.model.named_buffers())
    assert eager.keys() == ours.keys() and ours, list(ours)
    return [name for name in eager if not torch.equal(eager[name], ours[name])]


def rates_used(rank: int, world: int, *, config: dict[str, Any]) -> list[float]:
    """Train; the learning rate that the first group had in each of the optimizer's steps."""
    from titanlike.trainer import Trainer

    trainer = Trainer(Config.model_validate(config))
    rates = []
    trainer.optimizer.torch.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    trainer.run()
    return rates


def run_into(rank: int, world: int, *, config: dict[str, Any], fault: str) -> str:
    """Train with TITANLIKE_FAULT; the error that ended it."""
    from titanlike.trainer import Trainer

    armed = faults.read_faults({faults.VARIABLE: fault})
    with mock.patch.object(faults, "_armed", armed):
        trainer = Trainer(Config.model_validate(config))
        try:
            trainer.run()
        except faults.InjectedFault as error:
            trainer.metrics.close()  # a process that ends would
            return str(error)
    return "no error"


def mean_of_documents(config: dict[str, Any], texts: list[str]) -> float:
    """Mean loss of the untrained model over the predicted tokens of documents, each of them alone; one process."""
    settings = Config.model_validate(config)
    model = Decoder(decoder_spec(settings), seq_len=settings.training.seq_len, kernel="math", loss="logits")
    materialise(model, "cpu", initial_values(model, settings.debug.seed))
    tokenizer = load_tokenizer(settings.model.hf_assets_path)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text, True, True)])
        with torch.no_grad():
            logits = model.logits(model(ids[:, :-1]))[0]
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def saved(path: Path) -> dict[str, torch.dtype]:
    """Names and types of the tensors in a checkpoint."""
    metadata = storage.read_metadata(path)
    return {name: entry.properties.dtype for name, entry in metadata.state_dict_metadata.items()}
