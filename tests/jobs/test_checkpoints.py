"""What a run leaves in its checkpoints, and what other runs make of it."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.jobs import inspections
from tests.jobs.jobs import consumed, curve, lines
from titanlike.checkpoint.folders import scan

RUN = "tests.jobs.jobs:run"
LOADED = "tests.jobs.inspections:loaded"
TWO_GROUPS = {"param_groups": [{"pattern": "attention", "lr": 5e-4, "weight_decay": 0.02}]}


def go(pool, config, world=1, **options):
    return pool.run(RUN, world=world, group=False, config=config, **options)


def test_wrappers_do_not_show_in_checkpoints(pool, tiny, tmp_path):
    """One run, started anew at each step with another mixture of compilation, recomputation and ranks."""
    mixtures = [(False, "full", 2), (True, "none", 1), (True, "full", 2), (False, "none", 1)]
    folder = tmp_path / "run"
    small = {"overrides": {**tiny(folder)["model"]["overrides"], "n_layers": 1}}
    for step, (compiled, recomputed, world) in enumerate(mixtures, start=1):
        config = tiny(
            folder,
            model=small,
            training={"steps": step},
            lr_scheduler={"total_steps": 12},
            compile={"enable": compiled, "backend": "aot_eager"},
            activation_checkpoint={"mode": recomputed},
        )
        assert go(pool, config, world) == ["done"] * world
    go(pool, tiny(tmp_path / "whole", model=small, training={"steps": 4}, lr_scheduler={"total_steps": 12}))
    kept = [*scan(folder / "checkpoints"), *scan(tmp_path / "whole" / "checkpoints")]
    names = [inspections.saved(one.path).keys() for one in kept]
    assert len(names) == 5 and all(one == names[0] for one in names)
    ours, want = curve(folder), curve(tmp_path / "whole")
    for step in range(1, 5):
        assert ours[step] == pytest.approx(want[step], rel=1e-5), mixtures[step - 1]


@pytest.fixture(scope="module")
def four_steps(pool, tiny, tmp_path_factory):
    """A run of two ranks and two groups with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("four") / "run"
    config = tiny(folder, training={"steps": 4}, lr_scheduler={"total_steps": 12}, checkpoint={"interval": 2})
    config["optimizer"] |= TWO_GROUPS
    go(pool, config, world=2)
    return config


def test_groups_and_moments_come_back_at_any_number_of_ranks(pool, four_steps):
    results = {world: pool.run(LOADED, world=world, group=False, config=four_steps)[0] for world in (1, 2, 4)}
    for result in results.values():
        assert result["options"] == results[1]["options"]
        assert result["tensors"].keys() == results[1]["tensors"].keys()
        assert all(torch.equal(tensor, results[1]["tensors"][name]) for name, tensor in result["tensors"].items())
    steps = {name: t for name, t in results[1]["tensors"].items() if name.endswith(".step")}
    assert steps and all(step == 4 for step in steps.values())
    options = results[1]["options"]
    assert options["layers.0.attention.wq.weight"]["peak_lr"] == 5e-4
    assert options["layers.0.attention.wq.weight"]["weight_decay"] == 0.02
    assert options["layers.0.feed_forward.w1.weight"]["peak_lr"] == 1e-3
    assert options["norm.weight"]["weight_decay"] == 0


@pytest.mark.parametrize("damage", ["no state.json", "half a shard", "no shard", "no .metadata"])
def test_a_damaged_checkpoint_is_passed_over(pool, four_steps, tmp_path, damage):
    """With an empty folder of a later step beside it. What is asked for by number must be whole."""
    folder, original = tmp_path / "run", Path(four_steps["job"]["dump_folder"])
    shutil.copytree(original, folder)
    config = {**four_steps, "job": {"dump_folder": str(folder)}}
    newest = folder / "checkpoints" / "step-4"
    (folder / "checkpoints" / "step-9").mkdir()
    shard = sorted(newest.glob("*.distcp"))[1]
    gone = {"no state.json": newest / "state.json", "no shard": shard, "no .metadata": newest / ".metadata"}
    if damage in gone:
        gone[damage].unlink()
    else:
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(AssertionError, match=r"CheckpointError.*step 4"):
        go(pool, {**config, "checkpoint": {**config["checkpoint"], "load_step": 4}}, world=2)
    go(pool, config, world=2)
    *_, last = (event for event in lines(folder / "events.jsonl") if event["kind"] == "restart")
    assert last["step"] == 2
    assert curve(folder) == curve(original)


def test_buffers_are_computed_whatever_was_in_memory(pool, four_steps):
    for result in pool.run("tests.jobs.inspections:garbage_in_buffers", world=2, group=False, config=four_steps):
        assert result == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_loss_is_a_uniform_guess_however_the_weights_came(pool, tiny, tmp_path, tied):
    """New weights on one rank, and the same out of a checkpoint on two ranks of another seed."""
    sections = {"training": {"steps": 1}, "data": {"seed": 0}, "optimizer": {"lr": 1e-30}}
    model = tiny(tmp_path)["model"]["overrides"] | {"tied_head": tied}
    new = tiny(tmp_path / "new", model={"overrides": model}, **sections)
    start = {"initial_load_path": str(tmp_path / "new" / "checkpoints" / "step-1")}
    from_checkpoint = tiny(
        tmp_path / "loaded", model={"overrides": model}, checkpoint=start, debug={"seed": 7}, **sections
    )
    go(pool, new)
    go(pool, from_checkpoint, world=2)
    (first,), (second,) = (curve(tmp_path / name).values() for name in ("new", "loaded"))
    assert first[0] == pytest.approx(math.log(1024), rel=0.1)
    assert second == pytest.approx(first, rel=1e-5)


def test_exports_have_their_own_type_and_checkpoints_keep_theirs(pool, tiny, tmp_path):
    """bf16 computation and export over fp32 weights: resuming is bit-equal, since the checkpoint is fp32."""
    sections = {"mixed_precision_param": "bfloat16"}
    export = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    go(
        pool,
        tiny(tmp_path / "run", training={**sections, "steps": 3}, lr_scheduler={"total_steps": 6}, checkpoint=export),
    )
    exported = inspections.saved(tmp_path / "run" / "exports" / "step-3")
    kept = inspections.saved(tmp_path / "run" / "checkpoints" / "step-3")
    assert set(exported.values()) == {torch.bfloat16}
    assert set(kept.values()) == {torch.float32}
    assert exported.keys() == {name for name in kept if not name.startswith("optimizer.")}
    for name in ("run", "whole"):
        go(pool, tiny(tmp_path / name, training={**sections, "steps": 6}, lr_scheduler={"total_steps": 6}))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
