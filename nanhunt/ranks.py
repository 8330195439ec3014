"""All ranks run a step again, or none does: agreed through the store, never by a collective."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

PATIENCE = 60.0  # seconds that a rank waits for the others to have finished their step

_nth = itertools.count()
_alone: list[str] = []  # once ranks have failed to answer, nobody waits again


def grouped() -> bool:
    """True when there is a process group, be it of this process alone."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def together() -> bool:
    """True when this process trains together with others."""
    return grouped() and torch.distributed.get_world_size() > 1


def rank() -> int | None:
    """The number of this process in its group; None without one."""
    return int(torch.distributed.get_rank()) if grouped() else None


def agree(mine: str, patience: float | None = None) -> tuple[bool, str]:
    """Whether all ranks run the step again, and why not in words. Every rank that asks gets the same answer.

    `mine` is "clean" or "fault" for how the step went on this rank, anything else for why it can't run again.
    Each rank writes its word down and reads those of the others; when one is missing for too long, the first
    to give up writes "no" where the decision stands, and a rank that comes later finds it there.
    """
    if _alone:
        return False, _alone[0]
    distributed = torch.distributed
    rank, world = distributed.get_rank(), distributed.get_world_size()
    meeting = store()
    if meeting is None:
        return False, "this torch does not tell where its ranks meet"
    patience = PATIENCE if patience is None else patience
    room = f"nanhunt/hunt/{next(_nth)}/"
    meeting.set(f"{room}{rank}", mine)
    words: dict[int, str] = {}
    for other in range(world):
        try:
            meeting.wait([f"{room}{other}"], timedelta(seconds=patience))
        except Exception:  # its type differs between stores and versions
            patience = 0.01
            continue
        words[other] = meeting.get(f"{room}{other}").decode()
    missing = [str(other) for other in range(world) if other not in words]
    cannot = {r: word for r, word in words.items() if word not in ("clean", "fault")}
    if missing:
        proposal = f"no: rank {', '.join(missing)} did not answer within the time"
    elif cannot:
        proposal = "no: " + "; ".join(f"rank {r}: {word}" for r, word in cannot.items())
    else:
        proposal = "go" if "fault" in words.values() else "clean"
    decision = meeting.compare_set(f"{room}decision", "", proposal).decode()
    if "did not answer" in decision:
        _alone.append(decision.removeprefix("no: "))
    return decision == "go", decision.removeprefix("no: ")


def store() -> Any:
    """The store that the default process group met in: private, and the only way to talk without a collective."""
    find: Callable[[], Any] | None = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    found = find() if find is not None else None
    return found if hasattr(found, "compare_set") else None


def place() -> dict[str, Any]:
    """Which process of which job this is: for the context of a finding, empty for one that trains alone."""
    if not together():
        return {}
    env = os.environ
    node = env.get("GROUP_RANK") or env.get("SLURM_NODEID")
    told = {
        "world_size": torch.distributed.get_world_size(),
        "local_rank": env.get("LOCAL_RANK") or env.get("SLURM_LOCALID"),
        "host": platform.node() or None,
        "node": node,
        # Elastic launchers start the workers anew after a failure: steps are then counted from there.
        "restart": env.get("TORCHELASTIC_RESTART_COUNT"),
        "job": env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID"),
        "backend": str(torch.distributed.get_backend()),
    }
    whole = ("local_rank", "node", "restart")
    kept = {key: value for key, value in told.items() if value is not None and value != "none"}
    return {key: int(value) if key in whole and str(value).isdigit() else value for key, value in kept.items()}
