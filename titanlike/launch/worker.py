"""Which process of the job this is, as torchrun's environment variables tell it. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def rank() -> int:
    """Number of this process among all of the job; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Number of processes of the job; 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def under_torchrun() -> bool:
    """True in a worker of torch's elastic launcher, ours or torchrun's."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often torch's elastic launcher on this node has started its workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def die_with_parent() -> None:
    """Have the kernel kill this worker when its launcher dies (Linux): a killed launcher must leave nobody behind."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
