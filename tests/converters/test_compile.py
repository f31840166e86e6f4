"""Compiled blocks: few graphs whatever the batches look like, and kernels that outlive a process."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from titanlike.config import Config
from titanlike.converters.compile import CACHE_VARIABLE, keep_kernels
from titanlike.errors import ConfigError
from titanlike.observe import recompilation
from titanlike.observe.recompilation import Recompilations


def test_batches_of_other_lengths_and_documents_share_graphs(pool):
    """Trained at one length on packed and plain rows, evaluated at another: one graph for each of the four kinds."""
    (steps,) = pool.run("tests.converters.jobs:graphs", world=1, documents=[[5], [5, 9], [], [3, 4, 5], [7], []])
    assert steps[-1]["graphs"] == 4
    assert steps[2]["graphs"] == 4, "nothing is compiled after the first packed and the first plain batch"
    said = [line for step in steps for line in step["said"]]
    assert len(said) == 3 and all("compiled again: forward (models/decoder.py:" in line for line in said)


def record(began, reason, name="forward", number=1):
    return SimpleNamespace(
        start_time=began,
        co_name=name,
        co_filename="/x/models/decoder.py",
        co_firstlineno=7,
        compile_id=f"3/{number}",
        entire_frame_compile_time_s=2.0,
        recompile_reason=reason,
    )


def test_each_recompilation_is_said_once(monkeypatch):
    records = [record(1.0, None), record(2.0, "size mismatch:\n 3 != 4")]
    monkeypatch.setattr("torch._dynamo.utils.get_compilation_metrics", lambda: list(records))
    watch = Recompilations()
    assert watch.report() == ["compiled again: forward (models/decoder.py:7), graph 2, 2.0 s: size mismatch: 3 != 4"]
    assert watch.report() == []
    records.append(record(3.0, "size mismatch:\n 3 != 4", number=2))
    records.append(record(4.0, "grad mode", number=3))
    assert [line.split(",")[1] for line in watch.report()] == [" graph 4"], "the same reason again is no news"
    assert recompilation.logger.name == "titanlike"


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.delenv(CACHE_VARIABLE)


def settings(folder, **compiled):
    return Config.model_validate({"job": {"dump_folder": str(folder)}, "compile": {"enable": True, **compiled}})


def test_where_kernels_are_kept(tmp_path, environment):
    keep_kernels(settings(tmp_path, enable=False))
    assert CACHE_VARIABLE not in os.environ
    keep_kernels(settings(tmp_path))
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "compiled") and (tmp_path / "compiled").is_dir()
    os.environ[CACHE_VARIABLE] = "/somewhere/else"
    keep_kernels(settings(tmp_path))
    assert os.environ[CACHE_VARIABLE] == "/somewhere/else", "the user's own, if the config says nothing"
    keep_kernels(settings(tmp_path, cache_folder=str(tmp_path / "named")))
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "named")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, environment):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile\.cache_folder.*can't be written to"):
        keep_kernels(settings(tmp_path, cache_folder=str(tmp_path / "file" / "below")))


COMPILE = """
import json, sys
import torch
from torch._dynamo.utils import counters
from titanlike.config import Config
from titanlike.converters.compile import keep_kernels

keep_kernels(Config.model_validate({"job": {"dump_folder": sys.argv[1]}, "compile": {"enable": True}}))
x = torch.linspace(0, 1, 64, requires_grad=True)
torch.compile(lambda x: (x.sin() * 3).sum())(x).backward()
print(json.dumps({"found": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
                  "made": counters["inductor"]["fxgraph_cache_miss"], "gradient": x.grad.sum().item()}))
"""


@pytest.mark.slow
def test_a_restart_finds_the_kernels_of_the_process_before(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH")}
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", COMPILE, str(tmp_path)], capture_output=True, text=True, check=True, env=clean
            ).stdout
        )
        for _ in range(2)
    ]
    assert runs[0]["made"] > 0 and runs[0]["found"] == 0
    assert runs[1]["made"] == 0 and runs[1]["found"] > 0
    assert runs[0]["gradient"] == runs[1]["gradient"]
