"""The one module that knows the device: an accelerator where torch has one, else the CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titanlike.errors import ConfigError
from titanlike.launch import worker


def _refuse_unusable_gpu() -> None:
    """A GPU that is there but that this torch can't use is an error: a silent run on the CPU would cost days."""
    present = shutil.which("nvidia-smi") is not None and os.path.exists("/dev/nvidia0")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or os.environ.get("TITANLIKE_DEVICE") == "cpu"
    if present and not hidden:
        raise ConfigError(
            f"this machine has an NVIDIA GPU (/dev/nvidia0) that torch {torch.__version__} can't use: install a CUDA "
            f"build of torch that fits the driver, or set TITANLIKE_DEVICE=cpu to train on the CPU"
        )


def device_type() -> str:
    """ "cuda", "xpu", … or "cpu". TITANLIKE_DEVICE=cpu asks for the CPU."""
    if os.environ.get("TITANLIKE_DEVICE") == "cpu":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        _refuse_unusable_gpu()
        return "cpu"
    return accelerator.type


def local_device() -> torch.device:
    """This process's device; makes it the current one."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def device_name(device: torch.device) -> str:
    """The device's product name, for looking up its peak; "cpu" on the CPU."""
    if device.type == "cpu":
        return "cpu"
    return torch.get_device_module(device).get_device_name(device)


def start_process_group(device: torch.device, timeout_seconds: int) -> None:
    """Joins the job's ranks, or makes a group of one when no launcher set the environment.

    Tensors on the CPU always have gloo, so that what the host decides never waits for the accelerator.
    """
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif store := _launchers_store(timeout):
        # Not torch's own way to it, in which workers that are started again find the addresses of those that died.
        store = dist.PrefixStore(f"start-{worker.restarts()}", store)
        dist.init_process_group(
            backend, store=store, rank=worker.rank(), world_size=worker.world_size(), timeout=timeout
        )
    else:
        dist.init_process_group(backend, timeout=timeout)


def _launchers_store(timeout: timedelta) -> dist.Store | None:
    """The store that torch's elastic launcher keeps for its workers; None if they are to make their own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, worker.world_size(), is_master=False, timeout=timeout)


def record_collectives(entries: int, dump: Path) -> None:
    """Has NCCL keep its last collectives and write them to `dump<rank>` on a timeout (0: not); before groups exist."""
    settings = {
        "TORCH_FR_BUFFER_SIZE": entries,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": int(entries > 0),
        "TORCH_FR_DUMP_TEMP_FILE": dump,
    }
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


def set_timeout(seconds: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """Changes how long a collective of these groups may take before the job is given up."""
    change = getattr(dist, "set_timeout", None)  # public since torch 2.14
    if change is None:
        from torch.distributed.distributed_c10d import _set_pg_timeout as change

    for group in groups:
        change(timedelta(seconds=seconds), group)


def check_materialised(model: torch.nn.Module) -> None:
    """Every parameter and buffer has memory; what was forgotten on the meta device is named."""
    named = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in named if tensor.is_meta]
    assert not left, f"left on the meta device: {left}"


def seed_everything(seed: int, step: int) -> None:
    """Seeds torch for one step.

    All that is random in a step is a function of (seed, step), so there is no generator state to save, and a resumed
    run draws what the uninterrupted one would have drawn.
    """
    torch.manual_seed((seed * 1_000_003 + step) % (1 << 63))


def make_deterministic(warn_only: bool) -> None:
    """Deterministic algorithms everywhere; costs speed on GPUs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
