import os
import stat

import pytest

from titanlike.errors import ConfigError
from titanlike.launch.options import count_gpus, read_options
from titanlike.train import wait_shortly

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_defaults_are_one_process_here():
    options, rest = read_options(["debug_model.toml", "--training.steps", "3"], NO_GPU)
    assert (options.processes, options.min_nodes, options.max_nodes, options.max_restarts) == (1, 1, 1, 0)
    assert options.endpoint == "localhost:0"
    assert not options.elastic
    assert rest == ["debug_model.toml", "--training.steps", "3"]


def test_variables_and_flags_that_win():
    environment = {
        "NGPU": "4",
        "NNODES": "1:3",
        "RDZV_ENDPOINT": "first:29500",
        "MAX_RESTARTS": "2",
        "SLURM_JOB_ID": "77",
    }
    options, rest = read_options(["a.toml", "--ngpu", "8", "--rdzv-endpoint=second:1"], environment)
    assert (options.processes, options.min_nodes, options.max_nodes) == (8, 1, 3)
    assert options.endpoint == "second:1"
    assert options.run_id == "77"
    assert options.max_restarts == 2
    assert options.world == 24
    assert options.elastic
    assert rest == ["a.toml"]


def test_overrides_pass_untouched():
    overrides = ["--training.steps=-1", "--lr", "-1", "-1", "--compile.no-enable", "--data.path", "a b", "c", "--x={}"]
    assert read_options(["a.toml", *overrides], NO_GPU)[1] == ["a.toml", *overrides]


def test_one_process_with_restarts_needs_the_elastic_launcher():
    assert read_options(["--max-restarts", "1"], NO_GPU)[0].elastic


def test_every_mistake_is_named():
    with pytest.raises(ConfigError) as error:
        read_options([], {"NGPU": "0", "NNODES": "3:2", "RDZV_ENDPOINT": "host", "MAX_RESTARTS": "-1"})
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match="need RDZV_ENDPOINT"):
        read_options([], {"NGPU": "1", "NNODES": "2"})


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,-1,1", 1), ("GPU-a,GPU-b", 2)]
)
def test_visible_gpus(visible, count):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_by_the_drivers_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\nprintf 'GPU 0: H200 (UUID: GPU-a)\\n  MIG 1g.18gb Device 0: (UUID: MIG-b)\\nGPU 1: H200\\n'\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert count_gpus({}) == 2
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver'\nexit 9\n")
    assert count_gpus({}) == 0


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_how_threads_wait_is_the_users_choice(name):
    assert wait_shortly({"PATH": "/bin"}) == {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000"}
    assert wait_shortly({name: "1"}) == {}
