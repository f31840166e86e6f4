"""Four ranks save; one, two, three and four load: bit-equal, every rank of the same mind.

Starting ranks takes seconds, so one set of them runs all the checks below and writes what it found to a file; a failed
check tells its traceback. Each check is a collective, so it must fail on all ranks or on none.
"""

import json
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.conftest import Settings
from titanlike.checkpoint import folders, loading, manifest, storage
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.errors import CheckpointError

WORLD = 4
Tensors = dict[str, torch.Tensor]


def model_and_optimizer(mesh: DeviceMesh | None, seed: int) -> Tensors:
    """A fully sharded model after two steps of AdamW, as flat tensors. Its sizes don't divide; its last bias has 3."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 10)).square().sum().backward()
        optimizer.step()
    flat: Tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        flat |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return flat


def whole(tensors: Tensors) -> Tensors:
    """Every tensor in full, on the ranks of its mesh."""
    return {name: one.full_tensor() if isinstance(one, DTensor) else one.clone() for name, one in tensors.items()}


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def mesh_of(ranks: int) -> DeviceMesh:
    """The first so many ranks; every rank has to call."""
    return DeviceMesh("cpu", list(range(ranks)))


def reshard(manager: Callable[..., CheckpointManager]) -> None:
    """Saved on 4, loaded on 4, 3, 2, 1 ranks and into plain tensors: bit-equal, empty shards and scalars included."""
    saved = model_and_optimizer(mesh_of(4), seed=1)
    assert any(isinstance(one, DTensor) and one.to_local().numel() == 0 for one in saved.values()) == (
        dist.get_rank() == 3
    )
    assert saved["optimizer.0.weight.step"].shape == ()
    expected = whole(saved)
    first = manager("reshard")
    first.save(2, saved, {"rank": dist.get_rank()})
    found = first.find()
    assert found is not None and found.step == 2 and found.state == {"rank": 0}
    for ranks in (4, 3, 2, 1):
        mesh = mesh_of(ranks)
        if dist.get_rank() < ranks:
            into = model_and_optimizer(mesh, seed=2)
            assert not same(whole(into), expected)
            loading.load(found.path, into, mesh.get_group())
            assert same(whole(into), expected)
    dist.barrier()
    plain = model_and_optimizer(None, seed=2)
    first.load(found, plain)
    assert same(plain, expected)


def replicas(manager: Callable[..., CheckpointManager]) -> None:
    """Replicate 2 × shard 2: every piece is written by one rank, the work is shared, and plain loads are equal."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    saved = model_and_optimizer(mesh, seed=1)
    expected = whole(saved)
    first = manager("replicas")
    first.save(1, saved, {})
    found = first.find()
    assert found is not None
    metadata = storage.read_metadata(found.path)
    pieces = [(index.fqn, tuple(index.offset or ())) for index in metadata.storage_data]
    assert len(pieces) == len(set(pieces)) == sum(len(metadata.state_dict_metadata[name].chunks) for name in saved)
    files = [one for name, one in manifest.read(found.path).files.items() if name.endswith(".distcp")]
    assert len(files) == 4 and all(one.size for one in files)
    plain = model_and_optimizer(None, seed=2)
    first.load(found, plain)
    assert same(plain, expected)


def background(manager: Callable[..., CheckpointManager]) -> None:
    """A new folder, every step saved in the background while weights change: two are left, both as at the call."""
    first = manager("background", async_mode="async", keep_latest_k=2)
    saved = model_and_optimizer(mesh_of(4), seed=1)
    kept: dict[int, Tensors] = {}
    for step in range(1, 7):
        kept[step] = whole(saved)
        first.save(step, saved, {"step": step})
        first.before_update()
        with torch.no_grad():
            for one in saved.values():
                one.add_(1)
    first.wait()
    dist.barrier()
    assert [(one.step, one.complete) for one in folders.scan(first.folder)] == [(6, True), (5, True)]
    for step in (5, 6):
        found = first.find(step)
        assert found is not None and found.state == {"step": step}
        into = model_and_optimizer(mesh_of(4), seed=2)
        first.load(found, into)
        assert same(whole(into), kept[step])


def one_mind(manager: Callable[..., CheckpointManager]) -> None:
    """A file that only rank 2 reads is damaged: all ranks skip the checkpoint; asked for, all refuse it, naming it."""
    first = manager("one_mind")
    saved = model_and_optimizer(mesh_of(4), seed=1)
    first.save(1, saved, {})
    first.save(2, saved, {})
    damaged = first.folder / "step-2" / "__2_0.distcp"
    if dist.get_rank() == 0:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 4
        damaged.write_bytes(content)
    dist.barrier()
    found = first.find()
    assert found is not None and found.step == 1
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp: damaged"):
        first.find(2)
    with pytest.raises(CheckpointError, match="no tensor named unknown"):
        first.load(found, {**saved, "unknown": torch.zeros(1)})


def failing_disk(manager: Callable[..., CheckpointManager]) -> None:
    """The disk fails on rank 2 alone: every rank hears of it at the same call, and the checkpoint before stays."""
    first = manager("failing_disk", async_mode="async")
    saved = model_and_optimizer(mesh_of(4), seed=1)
    first.save(1, saved, {})
    first.wait()

    def fail(phase: str, step: int) -> None:
        if dist.get_rank() == 2:
            raise OSError(28, "No space left on device")

    patch = pytest.MonkeyPatch()
    patch.setattr(storage, "fault", fail)
    first.save(2, saved, {})
    with pytest.raises(CheckpointError, match=r"step-2 failed on rank 2: .*No space left.*bytes are free"):
        first.save(3, saved, {})
    patch.undo()
    dist.barrier()
    assert [one.step for one in folders.scan(first.folder)] == [1]
    first.save(3, saved, {}, final=True)
    assert [one.step for one in folders.scan(first.folder)] == [3, 1]


CHECKS = (reshard, replicas, background, one_mind, failing_disk)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    report = {}
    for check in CHECKS:

        def manager(name: str, **settings) -> CheckpointManager:
            return CheckpointManager(Settings(**settings), folder / name, topology={"dp": WORLD})

        try:
            check(manager)
            report[check.__name__] = None
        except BaseException:
            report[check.__name__] = traceback.format_exc()
            break  # the ranks may have come apart
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    folder = tmp_path_factory.mktemp("ranks")
    # The fork server imports torch once for all ranks.
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint"])
    ranks = torch.multiprocessing.start_processes(work, (folder,), WORLD, join=False, start_method="forkserver")
    while not ranks.join():
        pass
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ranks(reports: list[dict[str, str | None]], check: Callable) -> None:
    for rank, report in enumerate(reports):
        problem = report.get(check.__name__, "not reached")
        assert problem is None, f"rank {rank}: {problem}"
