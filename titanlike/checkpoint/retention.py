"""Which checkpoints stay.

The newest `keep` complete ones by step number, and always the one just written. Incomplete ones are never counted. A
torn save goes once a newer checkpoint is complete; a damaged one (it was complete once, and a person may want to rescue
it) only once it is older than everything that is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from titanlike.checkpoint import folders
from titanlike.checkpoint.folders import StepFolder

logger = logging.getLogger("titanlike")


def expendable(found: Sequence[StepFolder], keep: int, written: int) -> list[StepFolder]:
    """Those of `found` (newest first) that go after step `written` was saved. `keep` = 0 keeps every complete one."""
    if keep < 0:
        raise ValueError(f"checkpoint.keep_latest_k = {keep}: must be 0 (keep all) or more")
    complete: dict[int, StepFolder] = {}
    for one in found:
        if one.complete:
            complete.setdefault(one.step, one)  # of a step written anew, the new one
    if not complete:
        return []
    kept = list(complete.values())[: keep or None]
    kept += [one for one in complete.values() if one.step == written and one not in kept]
    newest, oldest = kept[0].step, min(one.step for one in kept)

    def goes(one: StepFolder) -> bool:
        if one.complete:
            return one not in kept
        return one.step < (newest if one.torn else oldest if keep else 0)

    # The oldest first, so that an interruption leaves the newer ones.
    return [one for one in reversed(found) if goes(one)]


def prune(folder: Path, keep: int, written: int) -> list[int]:
    """Remove what `expendable` names and return its steps. What can't be removed is logged and stays."""
    try:
        doomed = expendable(folders.scan(folder), keep, written)
    except OSError as error:
        logger.warning("%s: old checkpoints stay: %s", folder, error)
        return []
    for one in doomed:
        folders.remove(one.path)
    if doomed:
        logger.debug("removed old checkpoints: %s", ", ".join(one.path.name for one in doomed))
    return [one.step for one in doomed]
