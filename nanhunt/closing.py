"""What a run under the launcher says when it is over: the line about it, and the files of its report."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING

from .errors import UsageError
from .report.files import try_file, try_folder

if TYPE_CHECKING:
    from .roots import Roots


def is_file(report: str) -> bool:
    """Whether a report goes into one file of this name, and not into a folder."""
    return not os.path.isdir(report) and report.endswith((".json", ".html"))


def try_report(report: str) -> None:
    """See that a report can be written, before the program runs for hours.

    Raises:
        UsageError: when it cannot, or when the name has another suffix and is no folder: the file of that name
            that is asked for would not come.
    """
    if is_file(report):
        return try_file(report)
    folder = os.path.isdir(report) or report.endswith((os.sep, os.altsep or os.sep))
    if not folder and (os.path.splitext(report)[1] or os.path.exists(report)):
        raise UsageError(
            f"cannot write a report to {report!r}: name a file that ends in .json or .html, or a folder, which gets "
            f"both (a new one whose name has a suffix ends with {os.sep!r})"
        )
    return try_folder(report)


def watched(roots: Roots, *, alone: bool) -> str:
    """`watched 1 model (GPT2LMHeadModel), 120 steps`; not `alone` is a process with children of its own."""
    seen = roots.watched
    if not seen:
        here = "" if alone else " in this process"
        return f"{'' if roots.unwatched else f'no module was called{here}, so '}nothing was watched"
    models = list(dict.fromkeys(one.model for one in seen))
    names = ", ".join(models[:4]) + (", ..." if len(models) > 4 else "")
    steps, calls = max(one.steps for one in seen), sum(one.calls for one in seen)
    did = f"{steps} step{'s' * (steps != 1)}" if steps else f"{calls} call{'s' * (calls != 1)}"
    return f"watched {len(seen)} model{'s' * (len(seen) != 1)} ({names}), {did}"


def nothing(roots: Roots) -> str:
    """The verdict of a run without a fault."""
    handled = len(roots.findings)
    said = f"no fault ({handled} recorded that {'is' if handled == 1 else 'are'} none)" if handled else "nothing found"
    return f"{said} in what was watched" if roots.unwatched else said


def of_model(roots: Roots) -> str:
    """Which of several models a fault was found in: the names of modules are those of one model."""
    if roots.finding not in roots.findings or len(roots.watched) < 2:
        return ""
    return f" (model {roots.models[roots.findings.index(roots.finding)]})"


def unwatched(roots: Roots) -> list[str]:
    """The same in the words of the command line."""
    return [what.replace('compiled="eager"', "--compiled eager") for what in roots.unwatched]


def written(path: str, roots: Roots, program: str) -> str:
    """What the file `path` holds of a run: a page, or JSON; `program` is the command line that was run."""
    told = {"unwatched": unwatched(roots)} if roots.unwatched else {}
    findings = [
        dataclasses.replace(one, context={**one.context, "model": model, **told})
        for one, model in zip(roots.findings, roots.models, strict=True)
    ]
    if path.endswith(".html"):
        from .report.html import pages

        said = watched(roots, alone=True) + (f", {nothing(roots)}" if roots.watched and not roots.finding else "")
        lines = [f"python -m nanhunt {program}"] if program else []
        return pages(findings, notes=[*lines, said, *(f"not watched: {what}" for what in unwatched(roots))])
    return json.dumps([one.to_dict() for one in findings], indent=2, allow_nan=False) + "\n"
