import json
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, dict[str, Any]] = {
    "model": {"overrides": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 64}},
    "training": {
        "seq_len": 32,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "steps": 12,
        "mixed_precision_param": "float32",
    },
    "optimizer": {"lr": 1e-3},
    "lr_scheduler": {"warmup_steps": 4},
    "metrics": {"log_freq": 1},
    "checkpoint": {"interval": 100},
    "debug": {"deterministic": True},
}


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Path:
    """200 numbered documents of uneven length."""
    path = tmp_path_factory.mktemp("text") / "documents.jsonl"
    rows = [{"text": f"doc-{i:03d} " + "and so it goes on " * (1 + i * 7 % 5)} for i in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tiny(documents, tmp_path_factory):
    """tiny(folder, section={key: value}) → the config of a run that takes seconds, as a nested dict."""
    cache = tmp_path_factory.getbasetemp() / "stores"

    def make(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        config = {name: dict(values) for name, values in TINY.items()}
        config["job"] = {"dump_folder": str(folder)}
        config["data"] = {"path": [str(documents)], "log_consumed": True, "cache_folder": str(cache)}
        for name, values in sections.items():
            config.setdefault(name, {}).update(values)
        return config

    return make


@pytest.fixture
def launch(tmp_path):
    """launch(config, *argv, NGPU="2", …) → a Job: `./run_train.sh` with that config; keywords: environment."""
    from tests.jobs.processes import start

    jobs = []

    def launch(config: dict[str, Any], *argv: str, **environment: str):
        jobs.append(start(config, tmp_path / f"job-{len(jobs)}", *argv, **environment))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def forks():
    """Starts processes that train without paying for their imports."""
    from tests.jobs.forks import Forks

    with Forks() as forks:
        yield forks
