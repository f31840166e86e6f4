"""Which stage holds what, on which rank, and what schedules ask for: before anything runs, and without torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from titanlike.config import checks_parallel, load_config
from titanlike.errors import ConfigError
from titanlike.models.spec import decoder_spec
from titanlike.parallel.schedules import SCHEDULES, schedule_named
from titanlike.parallel.stages import plan_stages

_torch_version = checks_parallel.torch_version
KEY = "parallelism.module_fqns_per_model_part"


@pytest.fixture(autouse=True)
def torch_of_today(monkeypatch):
    """Rules on what an older torch can't are tested by themselves."""
    monkeypatch.setattr(checks_parallel, "torch_version", lambda: (2, 13))


def arguments(layers: int, degree: int, **options: object) -> list[str]:
    settings = {"model.overrides.n_layers": layers, "parallelism.pipeline_parallel_degree": degree}
    settings |= {f"parallelism.pipeline_parallel_{k}": v for k, v in options.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


def planned(*argv: str):
    config = load_config(argv)
    return plan_stages(config, decoder_spec(config))


def refused(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return [p.removeprefix("command line: ") for p in caught.value.problems]


def lists(*stages: list[str]) -> str:
    return f"--{KEY}={[*stages]}".replace("'", '"')


# ---- the split by cost


@pytest.mark.parametrize(
    ("layers", "degree", "options", "split"),
    [
        (4, 2, {}, [(0, 1), (2, 3)]),
        (5, 2, {}, [(0, 1, 2), (3, 4)]),
        (3, 4, {}, [(0,), (1,), (2,), ()]),
        (7, 2, {"schedule": "Interleaved1F1B"}, [(0, 1), (2, 3), (4, 5), (6,)]),
        (4, 2, {"first_stage_less_layers": 0, "last_stage_less_layers": 2}, [(0, 1, 2), (3,)]),
        (6, 2, {"layers_per_stage": 2, "schedule": "LoopedBFS"}, [(0,), (1, 2), (3, 4), (5,)]),
    ],
)
def test_layers_by_stage(layers, degree, options, split):
    plan = planned(*arguments(layers, degree, **options))
    assert [stage.part.layers for stage in plan.stages] == split


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS", "ZBVZeroBubble"])
@pytest.mark.parametrize("weights", [(0, 0), (1, 1), (0, 1), (2, 1)])
def test_any_split_is_whole_even_and_in_order(schedule, weights):
    first, last = weights
    options = {"schedule": schedule, "first_stage_less_layers": first, "last_stage_less_layers": last}
    for degree in (2, 3, 4, 8):
        for layers in range(1, 33):
            config = load_config([f"--model.overrides.n_layers={layers}"])
            section = config.parallelism.model_copy(
                update={"pipeline_parallel_degree": degree}
                | {f"pipeline_parallel_{key}": value for key, value in options.items()}
            )
            config = config.model_copy(update={"parallelism": section})
            count = degree * schedule_named(schedule).stages_a_rank
            try:
                stages = plan_stages(config, decoder_spec(config)).stages
            except ConfigError as error:
                (problem,) = error.problems
                assert (layers + first + last) // count < max(1, *weights), problem
                assert "layers" in problem and "parallelism.pipeline_parallel_" in problem
                continue
            assert [n for stage in stages for n in stage.part.layers] == list(range(layers))
            assert [stage.part.first for stage in stages] == [True] + [False] * (count - 1)
            assert [stage.part.last for stage in stages] == [False] * (count - 1) + [True]
            costs = [stage.cost for stage in stages]
            assert sum(costs) == layers + first + last and max(costs) - min(costs) <= 1
            assert all(stage.modules() for stage in stages)


def test_a_stage_without_anything_is_refused():
    (problem,) = refused(*arguments(3, 4, first_stage_less_layers=0, last_stage_less_layers=0))
    assert problem.startswith("parallelism.pipeline_parallel_degree = 4: ") and "the model's 3 layers" in problem
    (problem,) = refused(*arguments(4, 4, first_stage_less_layers=3))
    assert problem.startswith("parallelism.pipeline_parallel_first_stage_less_layers = 3: is more than a stage's share")


def test_the_split_is_printed():
    stages = lists(["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "output"])
    for argv in ([*arguments(4, 2), stages], arguments(4, 2)):
        assert planned(*argv).lines() == [
            "stage  rank  layers' cost  modules",
            "    0     0             3  tok_embeddings, layers.0, layers.1",
            "    1     1             3  layers.2, layers.3, norm, output",
        ]
    assert planned(*arguments(8, 2)).lines()[1].endswith("tok_embeddings, layers.0 … layers.3")


# ---- the split by lists


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.9", "output"]), "'layers.9' is none of"),
        ((["tok_embeddings", "layers.2"], ["layers.0", "layers.1", "norm", "output"]), "'layers.0' comes after"),
        (
            (["tok_embeddings", "layers.0", "layers.1"], ["layers.1", "layers.2", "norm", "output"]),
            "'layers.1' is there twice",
        ),
        ((["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]), "'layers.2' is missing"),
        ((["layers.0", "layers.1"], ["layers.2", "norm", "output"]), "'tok_embeddings' is missing"),
        (([], ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output"]), "stage 0 is empty"),
        ((["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm"], ["output"]), "'norm' must be on the last"),
    ],
)
def test_lists_that_are_no_split(stages, problem):
    problems = refused(*arguments(3, 2), lists(*stages))
    assert all(p.startswith(f"{KEY}: ") for p in problems)
    assert any(problem in p for p in problems)


def test_lists_say_how_many_stages_a_rank_holds():
    stages = [["tok_embeddings"], ["layers.0"], ["layers.1", "layers.2"], ["norm", "output"]]
    plan = planned(*arguments(3, 2, schedule="ZBVZeroBubble"), lists(*stages))
    assert [(s.rank, s.part.layers) for s in plan.stages] == [(0, ()), (1, (0,)), (1, (1, 2)), (0, ())]
    (problem,) = refused(*arguments(3, 2), lists(*stages))
    assert f"{KEY}: has 4 stages, which is 2 a rank" in problem and "schedule = '1F1B' takes 1" in problem
    (problem,) = refused(*arguments(3, 3, schedule="LoopedBFS"), lists(*stages))
    assert "has 4 stages, which must be a multiple of parallelism.pipeline_parallel_degree = 3" in problem
    (problem,) = refused(*arguments(3, 2, layers_per_stage=1), lists(*stages))
    assert f"{KEY}" in problem and "pipeline_parallel_layers_per_stage" in problem


# ---- stages and ranks


@pytest.mark.parametrize(
    ("schedule", "degree", "ranks"),
    [
        ("1F1B", 4, [0, 1, 2, 3]),
        ("Interleaved1F1B", 2, [0, 1, 0, 1]),
        ("InterleavedZeroBubble", 4, [0, 1, 2, 3, 0, 1, 2, 3]),
        ("ZBVZeroBubble", 2, [0, 1, 1, 0]),
        ("dualpipev", 4, [0, 1, 2, 3, 3, 2, 1, 0]),
    ],
)
def test_ranks_of_stages(schedule, degree, ranks):
    plan = planned(*arguments(8, degree, schedule=schedule))
    assert [stage.rank for stage in plan.stages] == ranks
    for rank in range(degree):
        assert [stage.index for stage in plan.of_rank(rank)] == [i for i, r in enumerate(ranks) if r == rank]


def test_layers_a_stage_make_the_number_of_stages():
    plan = planned(*arguments(10, 2, layers_per_stage=3, schedule="Interleaved1F1B"))
    assert len(plan.stages) == 4
    (problem,) = refused(*arguments(10, 2, layers_per_stage=3))
    assert "layers_per_stage = 3: makes 4 stages" in problem and "schedule = '1F1B' takes 1" in problem
    (problem,) = refused(*arguments(10, 2, layers_per_stage=2, schedule="ZBVZeroBubble"))
    assert "makes 6 stages" in problem and "takes 2" in problem
    (problem,) = refused(*arguments(10, 2, layers_per_stage=5, schedule="Interleaved1F1B"))
    assert "makes 3 stages" in problem and "multiple of parallelism.pipeline_parallel_degree = 2" in problem


# ---- microbatches


def _torch_takes(name: str, microbatches: int, degree: int) -> bool:
    """Whether torch's own constructor takes it."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = degree * SCHEDULES[name].stages_a_rank
    stages = [
        SimpleNamespace(
            stage_index=i,
            num_stages=count,
            group_size=degree,
            group_rank=0,
            submod=None,
            has_backward=True,
            is_first=i == 0,
            is_last=i == count - 1,
        )
        for i in range(count)
        if SCHEDULES[name].rank_of(i, degree) == 0
    ]
    try:
        get_schedule_class(name)(stages[0] if len(stages) == 1 else stages, microbatches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name, s in SCHEDULES.items() if s.placement != "table"])
def test_schedules_ask_for_what_torch_asks_for(name):
    schedule = SCHEDULES[name]
    for degree in (2, 3, 4):
        for microbatches in range(1, 12):
            problem = schedule.microbatch_problem(microbatches, degree, degree * schedule.stages_a_rank)
            assert (problem is None) == _torch_takes(name, microbatches, degree), (degree, microbatches)


def test_microbatches_that_do_not_suit_the_schedule():
    batch = "--training.local_batch_size"
    (problem,) = refused(*arguments(8, 4), f"{batch}=3")
    assert problem == (
        "parallelism.pipeline_parallel_schedule = '1F1B': needs at least as many microbatches as the 4 stages, but "
        "training.local_batch_size = 3 in rows of parallelism.pipeline_parallel_microbatch_size = 1 makes 3"
    )
    (problem,) = refused(*arguments(8, 2, schedule="Interleaved1F1B"), f"{batch}=5")
    assert "takes microbatches in 2 rounds of equal size over 2 ranks" in problem
    (problem,) = refused(*arguments(8, 2, schedule="DualPipeV"), f"{batch}=3")
    assert "needs at least as many microbatches as the 4 stages" in problem
    assert planned(*arguments(8, 2, schedule="DualPipeV", microbatch_size=2), f"{batch}=8").microbatches == 4


def test_local_batch_that_microbatches_do_not_divide():
    argv = [*arguments(8, 2), "--training.local_batch_size=6"]
    (problem,) = refused(*argv, "--parallelism.pipeline_parallel_microbatch_size=4")
    assert "microbatch_size = 4: must divide training.local_batch_size = 6 (remainder 2)" in problem
    assert planned(*argv, "--parallelism.pipeline_parallel_microbatch_size=3").microbatches == 2


def test_the_degree_that_is_left_of_the_processes():
    argv = ["--model.overrides.n_layers=3", "--parallelism.pipeline_parallel_degree=-1"]
    argv += ["--parallelism.data_parallel_shard_degree=1"]
    load_config(argv)
    load_config(argv, world=4)
    with pytest.raises(ConfigError, match="more than the model's 3 layers"):
        load_config(argv, world=8)


def test_everything_that_is_wrong_is_said_at_once():
    stages = lists(["tok_embeddings", "layers.0"], ["layers.2", "norm", "output"])
    problems = refused(*arguments(3, 2, microbatch_size=3), stages, "--training.local_batch_size=8")
    assert len(problems) == 2 and any("remainder 2" in p for p in problems) and any("'layers.1'" in p for p in problems)


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_what_does_not_go_with_halves_of_a_backward(schedule):
    argv = arguments(8, 2, schedule=schedule)
    clashes = ["--compile.enable", "--parallelism.fsdp_reshard_after_forward=always"]
    clashes += ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
    compiled, resharded, recomputed = refused(*argv, *clashes)
    assert all(f"pipeline_parallel_schedule = '{schedule}'" in text for text in (compiled, resharded, recomputed))
    assert "compile.components" in compiled and 'fsdp_reshard_after_forward = "always"' in resharded
    assert 'selective_ac_option = "op"' in recomputed
    planned(*argv, "--compile.enable", "--compile.components=loss", "--activation_checkpoint.mode=full")
    load_config([*arguments(8, 2, schedule="Interleaved1F1B"), *clashes])


@pytest.mark.parametrize("installed", [(2, 11), (2, 12), None])
def test_halves_of_a_backward_need_a_torch_that_can(monkeypatch, installed):
    monkeypatch.setattr(checks_parallel, "torch_version", lambda: installed)
    argv = arguments(8, 2, schedule="ZBVZeroBubble")
    if installed:
        (problem,) = refused(*argv)
        assert "needs torch 2.13; 2.1" in problem and "pipeline_parallel_schedule = 'ZBVZeroBubble'" in problem
    else:
        planned(*argv)
    planned(*arguments(8, 2, schedule="Interleaved1F1B"))


def test_the_version_of_torch_is_read_without_it():
    import torch

    installed = _torch_version()
    assert installed and torch.__version__.startswith("{}.{}.".format(*installed))


# ---- a schedule of the user's own

ONE_F_ONE_B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


@pytest.fixture
def table(tmp_path):
    def write(text: str) -> list[str]:
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        argv = arguments(4, 2, schedule="PipelineScheduleMulti", schedule_csv=path)
        return [*argv, "--training.local_batch_size=2"]

    return write


def test_a_table_says_which_rank_holds_what(table, monkeypatch):
    plan = planned(*table(ONE_F_ONE_B))
    assert [stage.rank for stage in plan.stages] == [0, 1]
    v = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    plan = planned(*table(v), "--training.local_batch_size=1")
    assert [stage.rank for stage in plan.stages] == [0, 1, 1, 0]
    monkeypatch.setattr(checks_parallel, "torch_version", lambda: (2, 11))
    (problem,) = refused(*table(v), "--training.local_batch_size=1")
    assert "schedule.csv': puts a stage on the rank of the one before, which needs torch 2.12" in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ONE_F_ONE_B + "2F0\n", "has 3 lines"),
        (ONE_F_ONE_B.replace("1F1", "1X1"), "line 2: '1X1' is no action"),
        (ONE_F_ONE_B.replace("1F1", "0F1"), "stage 0 is on lines 1 and 2"),
        (ONE_F_ONE_B.replace("1B1", ""), "stage 1 must take each of the 2 microbatches"),
        (ONE_F_ONE_B.replace("1B1", "1W1"), "stage 1 must have a W for each I"),
        (ONE_F_ONE_B.replace("1F", "3F").replace("1B", "3B"), "has stages 0, 3"),
    ],
)
def test_tables_that_are_no_schedule(table, text, problem):
    problems = refused(*table(text))
    assert all(p.startswith("parallelism.pipeline_parallel_schedule_csv = ") for p in problems)
    assert any(problem in p for p in problems)


def test_a_table_that_is_not_there():
    (problem,) = refused(*arguments(4, 2, schedule="PipelineScheduleSingle"))
    assert "names no file" in problem
    (problem,) = refused(*arguments(4, 2, schedule="PipelineScheduleSingle", schedule_csv="none.csv"))
    assert "can't be read" in problem


def test_checking_imports_no_torch():
    argv = arguments(8, 2, schedule="Interleaved1F1B")
    program = (
        f"import sys; from titanlike.config import load_config; load_config({argv}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
