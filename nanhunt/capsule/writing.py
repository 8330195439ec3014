"""A fault as one folder that replays anywhere: what is in it, and how it is written: whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import __version__, batches
from ..errors import NonFiniteWarning, UsageError
from ..finding import Finding
from ..report.files import whole_folder
from . import reproduction, safe_tensors
from .cargo import packed
from .catch import Part, Parts

FORMAT = 1
_MOST = 100  # in one folder: a program may make a thousand models, and each of them a fault
# Written in this order: a folder without the last of them does not open.
FINDING, TENSORS, REPRO, MANIFEST = "finding.json", "tensors.safetensors", "repro.py", "manifest.json"


def kept(finding: Finding, parts: Parts, folder: str | os.PathLike[str], *, slim: bool = False) -> Finding:
    """Write a capsule; the finding, whose context tells under "capsule" where it lies, or why there is none.

    Nothing that goes wrong here reaches the program: a full disk is a warning.
    """
    try:
        told = str(write(finding, parts, folder, slim=slim))
    except Exception as failure:
        said = str(failure) if isinstance(failure, UsageError) else f"{type(failure).__name__}: {failure}"
        reason = getattr(failure, "strerror", None) or said
        told = f"not written: {reason}"
        try:
            text = f"nanhunt could not write a capsule into {os.fspath(folder)!r}: {reason}"
            warnings.warn(text, NonFiniteWarning, stacklevel=2)
        except NonFiniteWarning:  # the program turns warnings into errors; the finding tells it all the same
            pass
    return dataclasses.replace(finding, context={**finding.context, "capsule": told})


def write(finding: Finding, parts: Parts, folder: str | os.PathLike[str], *, slim: bool = False) -> Path:
    """Write a capsule into a folder of capsules; where it lies. `slim`: cut down to what still fails.

    Raises:
        OSError: when it cannot be written; then nothing is left of it.
        UsageError: when the folder holds a hundred of them.
    """
    if os.path.isdir(folder) and len(os.listdir(folder)) >= _MOST:
        raise UsageError(f"it holds {_MOST} capsules already")
    with whole_folder(folder, _name(finding)) as (draft, placed):
        _fill(draft, finding, parts)
        if slim:
            from .slimming import slimmed  # runs the capsule again, with what nobody else needs here

            cut = slimmed(draft, parts, max_mb=(draft / TENSORS).stat().st_size / 1e6 + 1)
            (draft / MANIFEST).unlink()
            _fill(draft, finding, cut, slim=True)
    return placed[0]


def _fill(draft: Path, finding: Finding, parts: Parts, *, slim: bool = False) -> None:
    named = _named(parts)
    rows, blocks = packed({title: part.cargo for title, part in named.items()})
    manifest = {
        "format": FORMAT,
        "nanhunt": __version__,
        "versions": _versions(),
        "parts": {
            title: {"facts": part.facts, "trees": part.cargo.trees, "rows": rows[title]}
            for title, part in named.items()
        },
        "batches": [title for title in named if title.startswith("batch")],
        "hashes": [{"step": one["step"], "hash": batches.digest(one["sample"])} for one in parts.hashes],
        "left_out": [f"{title}.{what}" for title, part in named.items() for what in part.cargo.left_out],
        "missing": list(missing(finding, parts, slim=slim)),
    }
    texts = {
        FINDING: finding.to_json(indent=1) + "\n",
        REPRO: reproduction.program(finding, manifest),
        MANIFEST: json.dumps(manifest, allow_nan=False, separators=(",", ":")) + "\n",
    }
    safe_tensors.write(draft / TENSORS, blocks)
    for name in (FINDING, REPRO, MANIFEST):
        (draft / name).write_bytes(texts[name].encode("utf-8", errors="backslashreplace"))


def missing(finding: Finding, parts: Parts, *, slim: bool = False) -> Iterator[str]:
    """What a full replay would want and this capsule has not, in words."""
    both = "" if _ran_twice(finding) else "; nanhunt.hunt(step, batch, model=model, capsule=...) gives it"
    also = "" if _ran_twice(finding) else f"{both}, and so does detail='op'"
    sum_of = finding.op == "AccumulateGrad"  # no call of a module makes it, and no inputs show it
    if finding.module is not None and finding.phase != "input" and not sum_of:
        what = f"the inputs of {finding.module or 'the model'}"
        if parts.call is None or "call" not in parts.call.cargo.trees:
            gone = "they were gone when its backward ran" if finding.phase == "backward" else "they were not in hand"
            yield f"{what}: {gone}{both}"
        elif not parts.call.cargo.complete("call"):
            yield f"a part of {what}: see what was left out"
        elif parts.call.facts.get("changed"):
            changed = ", ".join(parts.call.facts["changed"])
            yield f"{what} as they were before it ran: it has written to {changed}{both}"
        if parts.call is not None and "call" in parts.call.cargo.trees and parts.call.facts["when"] == "after":
            yield from _later(parts.call, both)
        if finding.phase == "backward" and not _gradients(parts.call):
            yield f"the gradient that came back to {finding.module or 'the model'}{both}"
    if parts.op is None and finding.op is not None:
        yield f"the operands of {finding.op}{also}"
    elif parts.op is None and finding.phase != "input":
        yield f"the op, with its operands{also}"
    if slim:
        yield "the batch: slim leaves it out"
    elif parts.missing:
        yield from parts.missing
    elif not parts.batches:
        yield "the batch: it was gone by then; ring=1 keeps it, and so does nanhunt.hunt"


def _later(call: Part, both: str) -> Iterator[str]:
    """What was taken once the call was over, and may have been something else when it began."""
    if any(call.facts["training"].values()):
        also = "buffers and the " if call.facts["buffers"] else ""
        yield f"its {also}random numbers as they were before it ran: they were taken after it{both}"


def _ran_twice(finding: Finding) -> bool:
    """True for a finding of `hunt`, which has done all it can."""
    return "reproduced" in finding.context or "second_run" in finding.context


def _gradients(part: Part | None) -> bool:
    return part is not None and any(name.startswith("gradient ") for name in part.cargo.trees)


def _named(parts: Parts) -> dict[str, Part]:
    """The parts as they are written, by title; of equal blocks the first one's name stands in the file."""
    named = {title: part for title, part in (("op", parts.op), ("call", parts.call)) if part is not None}
    return named | {f"batch {i}": part for i, part in enumerate(parts.batches)}


def _name(finding: Finding) -> str:
    """`step12.rank3.encoder.norm`: of several ranks each writes its own."""
    parts = [f"step{finding.step if finding.step is not None else 0}"]
    if finding.rank is not None:
        parts.append(f"rank{finding.rank}")
    parts.append(finding.phase if not finding.module else re.sub(r"[^\w.-]", "_", finding.module)[:80])
    return ".".join(parts)


def _versions() -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
