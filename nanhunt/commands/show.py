"""`nanhunt show`: saved findings and diagnoses of logs again, as pages of text, JSON or HTML."""

from __future__ import annotations

import argparse
import json
import os

from ..course import Course
from ..errors import UsageError
from ..finding import Finding

_ABOUT = """\
Prints findings that were saved with Finding.to_json() or by a run under nanhunt: a file holds one, a list of
them, or one on each line. What `nanhunt log --json` has saved is printed, too.
"""
_CODES = "exit code: 0 when no file holds a fault, 1 when one does, 2 when a file cannot be read."


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
    from ..report.delivery import beside, deliver
    from ..report.files import in_folder, read_saved

    files = [file for name in options.files for file in (in_folder(name) if os.path.isdir(name) else [name])]
    read: list[tuple[str, Finding | Course]] = []
    for name in files:
        try:
            read += [(name, record) for record in read_saved(name)]
        except OSError as error:
            raise UsageError(f"cannot read {name!r}: {error.strerror or error}") from None
    out = options.output
    if options.html:
        text = _page([record for _, record in read])
        out = beside(files[0], out)
    elif options.json:
        text = json.dumps([record.to_dict() for _, record in read], indent=2, allow_nan=False) + "\n"
    else:
        text = _texts(files, read)
    deliver(text, out, files=files)
    return 1 if any(_is_ill(record) for _, record in read) else 0


def _is_ill(record: Finding | Course) -> bool:
    return record.symptom != "none" if isinstance(record, Course) else record.handled is None


def _page(records: list[Finding | Course]) -> str:
    from ..report import course_page, html

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
