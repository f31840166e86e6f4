"""The data sets that a config may use by name. Any other is a Hub id (`org/name`) or files."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where a named data set lives: on the Hub, or (hub_id None) in the package."""

    hub_id: str | None
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"


datasets: Registry[Dataset] = Registry("data set")

datasets.register("debug")(Dataset(hub_id=None))
# TorchTitan's names. Its c4_test was a sample of C4 that came with it; ours is the debug text.
datasets.register("c4_test")(Dataset(hub_id=None))
datasets.register("c4")(Dataset(hub_id="allenai/c4", subset="en"))
datasets.register("c4_validation")(Dataset(hub_id="allenai/c4", subset="en", split="validation"))
