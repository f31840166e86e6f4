"""Runs over pipeline and tensor ranks as a person starts them: refused, watched, stopped, killed, read by the tools."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.jobs.conftest import TINY
from tests.jobs.jobs import consumed, curve, lines
from tests.jobs.layouts import layout
from tests.jobs.processes import write_config
from tests.jobs.test_exit_codes import run_train
from titanlike import cli
from titanlike.errors import ConfigError

PP_TP = layout(pp=2, tp=2)
FOUR_LAYERS = {"overrides": {**TINY["model"]["overrides"], "n_layers": 4}}
STAGES = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "output"]]


def model(**overrides):
    return {"model": {"overrides": {**FOUR_LAYERS["overrides"], **overrides}}}


def degrees(schedule=None, **axes):
    return {"parallelism": layout(schedule, **axes)}


def stages(first, last):
    return {"parallelism": {**layout(pp=2), "module_fqns_per_model_part": [first, last]}}


# What is asked for, and what each of the messages must speak of.
REFUSED = {
    "query heads": (3, degrees(tp=3), [["tensor_parallel_degree = 3", "4 query heads"]]),
    "key/value heads": (
        6,
        model(n_heads=12, n_kv_heads=4) | degrees(tp=6),
        [["tensor_parallel_degree = 6", "4 key/value heads"]],
    ),
    "microbatches": (
        2,
        {
            "parallelism": {**layout(pp=2), "pipeline_parallel_microbatch_size": 4},
            "training": {"local_batch_size": 6, "global_batch_size": -1},
        },
        [["microbatch_size = 4", "local_batch_size = 6", "remainder 2"]],
    ),
    "fewer microbatches than stages": (4, degrees(pp=4), [["schedule = '1F1B'", "4 stages", "local_batch_size = 2"]]),
    "stages without layers": (
        4,
        model(n_layers=3) | degrees("LoopedBFS", pp=4),
        [["degree = 4", "8 stages", "3 layers"]],
    ),
    "a module that isn't there": (
        2,
        stages(STAGES[0], ["layers.9", *STAGES[1]]),
        [["module_fqns_per_model_part", "'layers.9'", "layers.0 … layers.3"]],
    ),
    "a module twice and out of order": (
        2,
        stages(["tok_embeddings", "layers.1", "layers.0", "layers.1"], STAGES[1]),
        [["'layers.0' comes after 'layers.1'"], ["'layers.1' is there twice"]],
    ),
    "no schedule of that name": (2, degrees("1F2B", pp=2), [["pipeline_parallel_schedule = '1F2B'", "1F1B"]]),
    "a table for a schedule that has none": (
        2,
        {"parallelism": {**layout(pp=2), "pipeline_parallel_schedule_csv": "/none.csv"}},
        [["schedule_csv = '/none.csv'", "PipelineScheduleMulti", "'1F1B'"]],
    ),
    "stages without a pipeline": (
        2,
        {"parallelism": {**layout(tp=2), "module_fqns_per_model_part": [["a"]]}},
        [["module_fqns_per_model_part = [['a']]", "pipeline_parallel_degree = 1"]],
    ),
    "a length for context ranks": (
        2,
        {"training": {"seq_len": 11}} | degrees(cp=2),
        [["training.seq_len = 11", "multiple of 4", "context_parallel_degree = 2"]],
    ),
    "heads for Ulysses": (
        8,
        {"parallelism": {**layout(cp=4, tp=2), "context_parallel_rotate_method": "ulysses"}},
        [["rotate_method = 'ulysses'", "context_parallel_degree = 4", "2 query heads"]],
    ),
    "the product": (
        6,
        degrees(pp=2, cp=2, tp=2),
        [["pipeline_parallel_degree = 2", "context_parallel_degree = 2", "tensor_parallel_degree = 2", "6 processes"]],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_starts(tiny, tmp_path, monkeypatch, capsys, what):
    processes, sections, expected = REFUSED[what]
    folder = tmp_path / "run"
    sections = {"model": FOUR_LAYERS, **sections}
    toml = write_config(tiny(folder, **sections), tmp_path / "run.toml")
    monkeypatch.setenv("NGPU", str(processes))
    assert cli.main(["train", str(toml)]) == ConfigError.exit_code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == len(expected), said
    for line, words in zip(said, expected, strict=True):
        assert all(word in line for word in words), line
    assert not folder.exists()


def test_it_is_said_once_and_not_by_every_process(tiny, tmp_path):
    """Two mistakes in the axes, and eight processes that never come to be."""
    config = tiny(tmp_path / "run", training={"seq_len": 30}, **degrees(cp=2, tp=4) | model(n_heads=6))
    done = run_train(write_config(config, tmp_path / "run.toml"), NGPU="8")
    assert done.returncode == 2
    assert done.stderr.count("tensor_parallel_degree = 4") == done.stderr.count("seq_len = 30") == 1
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


EVERYTHING = {
    "model": FOUR_LAYERS,
    "training": {"steps": 3, "global_batch_size": 4, "dataloader": {"num_workers": 1}},
    "parallelism": {**PP_TP, "module_fqns_per_model_part": STAGES},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "checkpoint": {"async_mode": "async", "interval": 2, "last_save_model_only": True, "export_dtype": "bfloat16"},
    "profiling": {"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1},
    "metrics": {"measure_cpu_peak": True, "enable_tensorboard": True, "save_for_all_ranks": True},
    "data": {"validation_fraction": 0.1},
    "validation": {"enable": True, "freq": 2, "local_batch_size": 2},
    "debug": {"detect_anomaly": True},
}


@pytest.fixture(scope="module", params=["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def everything(forks, tiny, tmp_path_factory, request):
    """The folder of a finished run with all that can be switched on, and what was printed meanwhile."""
    home = tmp_path_factory.mktemp("everything")
    compiled = {"enable": request.param == "compiled", "backend": "aot_eager"}
    config = write_config(tiny(home / "run", **EVERYTHING, compile=compiled), home / "run.toml")
    pids = forks.start("--job.config_file", str(config), world=4, output=home / "output")
    codes = [forks.wait(pid) for pid in pids]
    console = (home / "output").read_text()
    assert codes == [0] * 4, console
    return home / "run", console


@pytest.mark.timeout(400)
def test_everything_switched_on_at_once(everything, pool, tiny, tmp_path):
    folder, _ = everything
    plain = tiny(
        tmp_path,
        **{name: EVERYTHING[name] for name in ("model", "data", "validation")},
        training={"steps": 3, "global_batch_size": 4},
    )
    pool.run("tests.jobs.jobs:run", world=1, group=False, config=plain)
    rows, want = lines(folder / "metrics.jsonl"), lines(tmp_path / "metrics.jsonl")
    for ours, theirs in zip(rows, want, strict=True):
        assert (ours["tokens"], ours["trained_tokens"]) == (theirs["tokens"], theirs["trained_tokens"])
        for key in ("loss", "grad_norm", "validation_loss"):
            assert (key in ours) == (key in theirs)
            assert ours.get(key, 0.0) == pytest.approx(theirs.get(key, 0.0), rel=1e-5), (key, ours["step"])
        assert 0 < ours["mfu"] < 1 and ours["tokens_per_second"] > 0
    assert consumed(folder) == consumed(tmp_path)
    traces = [str(path.relative_to(folder)) for path in folder.rglob("*.json.gz")]
    assert sorted(traces) == [f"profiles/step-3/rank-{rank}.json.gz" for rank in range(4)]
    assert len(list(folder.glob("tensorboard/rank-*/events*"))) == 4


def test_the_console_shows_the_run_and_nothing_else(everything):
    folder, console = everything
    assert console.count("pipeline 2 × tensor 2") == 1
    plan = re.search(r"schedule 1F1B over 2 stages:\n(.*\n)(.*\n)(.*\n)", console)
    assert plan and "tok_embeddings, layers.0, layers.1" in plan[2] and "layers.2, layers.3, norm, output" in plan[3]
    assert len(re.findall(r"layers\.0\b", console)) == 1, "said once, and not by every rank"
    steps = re.findall(r"step (\d)/3  loss (\S+)  grad norm (\S+)", console)
    assert [(int(n), loss) for n, loss, _ in steps] == [(n, f"{loss:.4f}") for n, (loss, _) in curve(folder).items()]
    foreign = [line for line in console.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)]
    assert foreign == []
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(1, 4)]
    assert not any("Warning" in log or re.search(r"^\[?[WI]\d{4}", log, re.M) for log in logs), logs


def test_the_tools_read_its_checkpoints(everything, capsys):
    folder, _ = everything
    assert cli.main(["checkpoint", "list", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found] == [3, 2]
    assert found[0]["topology"]["pipeline"] == found[0]["topology"]["tensor"] == 2
    assert found[0]["made"]["world_size"] == 4
    for place in (folder, folder / "exports" / "step-3"):
        assert cli.main(["checkpoint", "verify", str(place)]) == 0
        assert "ok" in capsys.readouterr().out
        words = ["generate", str(place), "--prompt", "doc-001 and", "--max-new-tokens", "4", "--temperature", "0"]
        assert cli.main(words) == 0
        assert capsys.readouterr().out.startswith("doc-001 and")


LONG = {"model": FOUR_LAYERS, "training": {"steps": 60}, "lr_scheduler": {"total_steps": 60}, "parallelism": PP_TP}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_and_killed(pool, tiny, launch, tmp_path):
    """SIGTERM to one rank: saved, 75. kill -9 of another one: the job ends with 1. Gone on with after both."""
    config = tiny(tmp_path / "run", **LONG, checkpoint={"interval": 1, "keep_latest_k": 2})
    job = launch(config, NGPU="4")
    job.wait_for_step(2)
    second = launch(config, NGPU="4")
    assert second.wait() == 2 and second.err.count("error: ") == 1, second.err
    os.kill(job.workers()[3], signal.SIGTERM)
    assert job.wait() == 75, job.err
    assert "Traceback" not in job.out + job.err and not job.members()
    stopped_at = job.status.step
    assert (job.folder / "checkpoints" / f"step-{stopped_at}" / "manifest.json").exists()

    job = launch(config, NGPU="4")
    job.wait_for_step(stopped_at + 2)
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait() == 1
    assert "rank 1 was ended by SIGKILL" in job.err and not job.members()
    reached = job.logged_step()

    last = {**LONG, "training": {"steps": reached + 2}}
    job = launch(tiny(tmp_path / "run", **last), NGPU="4")
    assert job.wait() == 0, job.err
    restart = [event["step"] for event in lines(job.folder / "events.jsonl") if event["kind"] == "restart"][-1]
    assert reached - 2 <= restart <= reached
    pool.run("tests.jobs.jobs:run", world=4, group=False, config=tiny(tmp_path / "whole", **last))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
