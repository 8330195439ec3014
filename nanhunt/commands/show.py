"""`nanhunt show`: saved findings and diagnoses of logs again, as pages of text, JSON or HTML."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..finding import Finding
from ..symptoms.course import Course

if TYPE_CHECKING:
    from ..report.ranks import Attempt

_ABOUT = """\
Prints findings that were saved with Finding.to_json() or by a run under nanhunt: a file holds one, a list of
them, or one on each line. The files of several ranks (finding.rank3.json) give one verdict: which rank was
first, by step and phase and not by clocks, and who was handed it; also when some are missing or torn. What
`nanhunt log --json` has saved is printed, too.
"""
_CODES = """\
exit code: 0 when no file holds a fault, 1 when one does, 2 when a file cannot be read (of several ranks:
when none of those that can be read holds a fault).
"""


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt show",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a file of findings in JSON, a folder of reports (its *.json files), or - for standard input",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all findings as one JSON list")
    form.add_argument(
        "--html",
        action="store_true",
        help="all findings as one page for a browser, written next to the first FILE: a.json gives a.html",
    )
    made.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return made


def run(options: argparse.Namespace) -> int:
    """Print or write the findings; the exit code says whether one is a fault.

    Raises:
        UsageError: when a file cannot be read or written, with the reason.
    """
    from ..report import ranks
    from ..report.delivery import beside, deliver
    from ..report.files import in_folder

    files = [file for name in options.files for file in (in_folder(name) if os.path.isdir(name) else [name])]
    told, torn = _read_all(files)
    tried = ranks.attempts(_findings(told))
    if torn and not tried:
        raise torn[0][1]
    for _, error in torn if tried and not options.html else ():
        print(f"nanhunt: left out: {error}", file=sys.stderr)
    read = [(name, record) for name, records in told for record in records]
    out = options.output
    if options.html:
        text = _page([record for _, record in read], tried, [str(error) for _, error in torn])
        out = beside(files[0], out)
    elif options.json:
        text = json.dumps([record.to_dict() for _, record in read], indent=2, allow_nan=False) + "\n"
    else:
        text = _verdict(tried) if tried else _texts(files, read)
    deliver(text, out, files=files)
    if any(_is_ill(record) for _, record in read):
        return 1
    return 2 if torn else 0


def _read_all(files: list[str]) -> tuple[list[tuple[str, list[Finding | Course]]], list[tuple[str, UsageError]]]:
    """What each file that can be read holds, and why the others cannot."""
    from ..report.files import read_saved

    told: list[tuple[str, list[Finding | Course]]] = []
    torn: list[tuple[str, UsageError]] = []
    for name in files:
        try:
            told.append((name, read_saved(name)))
        except OSError as error:
            torn.append((name, UsageError(f"cannot read {name!r}: {error.strerror or error}")))
        except UsageError as error:
            torn.append((name, error))
    return told, torn


def _findings(told: list[tuple[str, list[Finding | Course]]]) -> list[tuple[str, list[Finding]]]:
    return [(name, [record for record in records if isinstance(record, Finding)]) for name, records in told]


def _verdict(tried: list[Attempt]) -> str:
    """The one verdict over several ranks, and all of them in a picture."""
    from ..report import ranks
    from ..report.text import page

    first = ranks.chosen(tried)
    verdict = first.consensus.verdict
    said = [page(verdict)] if verdict is not None else ["no rank has a fault"]
    return "\n\n".join([*said, ranks.text(first.consensus), *_other_attempts(tried, first)]) + "\n"


def _other_attempts(tried: list[Attempt], first: Attempt) -> list[str]:
    """Of a job that an elastic launcher has started several times: what the other starts have found."""
    lines = []
    for one in tried if len(tried) > 1 else ():
        verdict = one.consensus.verdict
        what = verdict.title() if verdict is not None else "no fault"
        lines.append(f"start {one.restart + 1} of the job{' (above)' if one is first else ''}: {what}")
    return lines


def _is_ill(record: Finding | Course) -> bool:
    return record.symptom != "none" if isinstance(record, Course) else record.handled is None


def _page(records: list[Finding | Course], tried: list[Attempt], torn: list[str]) -> str:
    from ..report import course_page, html, ranks

    if tried:
        first = ranks.chosen(tried)
        return html.of_ranks(first.consensus, notes=[*_other_attempts(tried, first), *torn])
    findings = [record for record in records if isinstance(record, Finding)]
    courses = [record for record in records if isinstance(record, Course)]
    if findings and courses:
        raise UsageError("findings and the diagnoses of whole runs are pages of two kinds: show them one after another")
    return course_page.pages(courses) if courses else html.pages(findings)


def _texts(files: list[str], read: list[tuple[str, Finding | Course]]) -> str:
    if not read:
        return f"no finding in {', '.join('standard input' if name == '-' else name for name in files)}\n"
    said = []
    for at, (name, record) in enumerate(read, 1):
        heading = f"{'' if at == 1 else chr(10)}{at} of {len(read)}: {name}\n\n" if len(read) > 1 else ""
        said.append(f"{heading}{record}\n")
    return "".join(said)
