"""`nanhunt replay`: the fault of a capsule again, in another precision, or with the fewest samples that still fail."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import UsageError, enabled
from ..report.lines import clean

if TYPE_CHECKING:
    from torch import nn

    from ..capsule.replaying import Attempt, Capsule

REPRODUCED, NOT_REPRODUCED = 0, 3

_ABOUT = """\
Runs again what a capsule holds: the module that made the fault, on its own inputs, and the operation alone.
A module of torch.nn is rebuilt from its type and configuration; for any other, --model names what builds the
model that it stands in. Nothing of the capsule itself is run as code, whoever made it, and no more memory is
taken than --max-mb; its repro.py is a program, to be read before it is run.
"""
_CODES = "exit code: 0 when the same fault comes again, 3 when it does not, 2 when it cannot be run."


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt replay",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("capsule", metavar="CAPSULE", help="the folder of a capsule")
    made.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="what builds the model, such as train:build or train.py:build; it returns the model, or a tuple whose "
        "first part is the model. The recorded weights of the culprit are put into it",
    )
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="compute in this dtype instead, without autocast: does the fault disappear?",
    )
    made.add_argument("--bisect", action="store_true", help="find the fewest samples, and rows, that still fail")
    made.add_argument("--device", metavar="DEVICE", default="cpu", help="where to run, such as cuda (default: cpu)")
    made.add_argument(
        "--max-mb",
        metavar="MB",
        type=float,
        default=4096.0,
        help="megabytes of the capsule that are read, and that running it may take (default: 4096; what an operation "
        "takes for its own work is bounded on Linux, on a CPU)",
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Replay a capsule; the exit code says whether the fault came again.

    Raises:
        UsageError: for a capsule that is none, or that cannot be run, with the reason.
    """
    if not options.max_mb > 0:
        raise UsageError(f"--max-mb {options.max_mb}: give a number of megabytes above 0")
    if not enabled():
        raise UsageError("nanhunt is switched off by NANHUNT=0: unset it to replay a capsule")
    from .. import factory
    from ..capsule.ceiling import ceiling
    from ..capsule.replaying import load_capsule
    from ..report.text import page

    capsule = load_capsule(options.capsule, max_mb=options.max_mb, device=options.device)
    model = factory.model_of(options.model).to(options.device) if options.model is not None else None
    _say(f"recorded:  {capsule.finding.title()}")
    for line in _where(capsule):
        _say(f"           {line}")
    for what in (*capsule.left_out, *capsule.missing):
        _say(f"           not in the capsule: {what}")
    with ceiling(options.max_mb) if options.device == "cpu" else contextlib.nullcontext():
        attempts = capsule.replay(model, dtype=options.dtype)
        for attempt in attempts:
            _say(_told(capsule, attempt, options.dtype))
        again = next((attempt.finding for attempt in attempts if attempt.finding is not None), None)
        if again is not None:
            print(f"\n{page(again)}\n")
        same = any(attempt.same for attempt in attempts)
        if options.bisect:
            for line in _smallest(capsule, model, options.dtype):
                _say(line)
    _say("reproduced" if same else "not reproduced")
    return REPRODUCED if same else NOT_REPRODUCED


def _smallest(capsule: Capsule, model: nn.Module | None, dtype: str | None) -> Iterator[str]:
    from ..capsule import bisecting

    try:
        yield from bisecting.bisect(capsule, model, dtype=dtype).lines()
    except UsageError as error:  # what a replay could run whole need not be something that takes parts
        yield f"bisect:    {error}"


def _where(capsule: Capsule) -> Iterator[str]:
    """On which machine it was recorded, and with which batches."""
    import torch

    told = {name: clean(capsule.versions.get(name))[:80] for name in ("torch", "device")}
    if told["torch"] != torch.__version__:
        yield f"with torch {told['torch']} on {told['device']}; this is torch {torch.__version__}"
    hashes = [f"{one.get('hash')} (step {one.get('step')})" for one in capsule.hashes[:2] if isinstance(one, dict)]
    if hashes:
        yield f"batch {hashes[-1]}" + (f", the one before it {hashes[0]}" if len(hashes) > 1 else "")


def _told(capsule: Capsule, attempt: Attempt, dtype: str | None) -> str:
    recorded = capsule.finding
    how = {
        "module": f"{recorded.module or 'the model'} on its own inputs",
        "op": f"{recorded.op or 'the operation'} alone, on its own operands",
        "model": "the whole model on the recorded batch",
        "batch": "the recorded batch",
    }[attempt.how]
    head = f"run again: {how}{f', in {dtype}' if dtype else ''}: "
    bad = ", ".join(attempt.kinds) or "nothing bad"
    if attempt.finding is None:
        return f"{head}{bad}{'' if attempt.same else f' (recorded: {recorded.kind})'}"
    if attempt.same:
        return f"{head}{attempt.finding.title()} (the same)"
    now = ", ".join(
        f"{name} {getattr(attempt.finding, name)}, was {getattr(recorded, name)}" for name in attempt.differs
    )
    return f"{head}{attempt.finding.title()} (not the same: {now})"


def _say(line: str) -> None:
    """A text of a file that may come from anybody: what would move the cursor is shown instead."""
    print(clean(line))
