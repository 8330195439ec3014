"""`nanhunt log`: what the log of a training run says about its numbers, and from which step on."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..symptoms.course import Course

FOUND, USAGE = 1, 2

_ABOUT = """\
Reads logs that training runs have written, and tells for each the first anomalous step, the symptom, the
likely cause and what to do, with the curves of the run.

Known are plain `step 12 | loss 2.31 | grad_norm 0.87` lines of any order, CSV, JSON lines, the logs of
transformers, Lightning, fairseq, DeepSpeed, Megatron, detectron2 and nanoGPT, messages of loss scalers,
TensorBoard event files, and the records that nanhunt.Monitor keeps; packed with gzip or not.
"""
_CODES = """\
exit code: 0 when no file shows a symptom, 1 when one does, 2 when a file cannot be read or nothing in it
is understood as a step.
"""


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt log",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("files", metavar="FILE", nargs="+", help="a log, or - for standard input; each is a run")
    made.add_argument("--ranks", action="store_true", help="the files are the ranks of one run")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON list with an object for each run")
    form.add_argument(
        "--html",
        action="store_true",
        help="one page for a browser, written next to the first FILE: run.log gives run.html",
    )
    made.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return made


def run(options: argparse.Namespace) -> int:
    """Print or write what the logs say; the exit code says whether one shows a symptom.

    Raises:
        UsageError: when a file cannot be read or written, with the reason.
    """
    from ..report.delivery import beside, deliver

    files: list[str] = options.files
    if files.count("-") > 1:
        raise UsageError("standard input (-) can be read only once")
    out = beside(files[0], options.output) if options.html else options.output
    runs = _read(files, together=options.ranks)
    courses = [course for _, course in runs]
    if options.html:
        from ..report.course_page import pages

        text = pages(courses)
    elif options.json:
        told = [{"file": name, **course.to_dict()} for name, course in runs]
        text = json.dumps(told, indent=2, allow_nan=False) + "\n"
    else:
        from ..report.course_text import pages as texts

        # A file is read elsewhere and later: in plain letters, and with all that UTF-8 has.
        text = texts(courses) if out is None else texts(courses, color=False, width=100, braille=True)
    deliver(text, out, files=files)
    if any(course.symptom != "none" for course in courses):
        return FOUND
    empty = [name for name, course in runs if not course.records]
    if empty:
        print(f"nanhunt: error: nothing in {', '.join(map(repr, empty))} was understood as a step", file=sys.stderr)
    return USAGE if empty else 0


def _read(files: Sequence[str], *, together: bool) -> list[tuple[str, Course]]:
    """The runs, each with the name of its file."""
    from ..logs.reading import read_log, read_ranks
    from ..report.progress import Bar

    read: list[tuple[str, Course]] = []
    name = files[0]
    try:
        if together:
            with Bar(name) as bar:
                return [(", ".join(files), read_ranks(files, progress=bar))]
        for name in files:
            with Bar(name) as bar:
                read.append((name, read_log(name, progress=bar)))
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or name!r}: {error.strerror or error}") from None
    return read
