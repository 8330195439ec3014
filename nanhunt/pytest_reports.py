"""What a test run tells of its findings: one line and a section per failing test, files, and a last line."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from .finding import Finding
from .headroom import Shortage
from .report.files import write_whole
from .report.lines import clean

_LONGEST = 120
_UNWATCHED = 5  # that are told


def file_name(node: str) -> str:
    """A name that every file system takes, the same for the same test and no other."""
    plain = re.sub(r"[^A-Za-z0-9_.\-\[\]]+", "-", node).strip("-.")[-_LONGEST:].lstrip("-.")
    return (
        plain
        if plain and plain == node
        else f"{plain}-{hashlib.sha256(node.encode('utf-8', 'replace')).hexdigest()[:8]}"
    )


def same(one: Finding, other: Finding) -> bool:
    """True for two records of one birth: a watch inside another tells the same story with another context."""
    names = ("phase", "step", "call", "module", "op", "line", "kind", "tensor")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def faults(findings: Iterable[Finding]) -> list[Finding]:
    """The faults among findings, each once."""
    found: list[Finding] = []
    for finding in findings:
        if finding.handled is None and not any(same(finding, one) for one in found):
            found.append(finding)
    return found


def save(folder: Path, node: str, findings: list[Finding]) -> list[Path]:
    """Write the page of the first finding, and the JSON of all, one on each line."""
    from .report.html import page

    name = file_name(node)
    return [
        write_whole(folder / f"{name}.html", page(findings[0])),
        write_whole(folder / f"{name}.json", "".join(finding.to_json() + "\n" for finding in findings)),
    ]


def save_shortage(folder: Path, node: str, shortage: Shortage) -> Path:
    """Write the table of numbers that came too close to the limit of a dtype."""
    return write_whole(folder / f"{file_name(node)}.headroom.txt", shortage.page() + "\n")


def shown(path: Path, root: Path) -> str:
    """A path as messages show it, from `root`."""
    try:
        return Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # another drive
        return str(path)


def shorten(longrepr: Any, text: str, *, whole: bool) -> None:
    """Let the first line of `text` be the one line that pytest's summary shows of a failure that it has represented.

    Without `whole` it also takes the place of the error's own text, because a section holds that.
    """
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"nanhunt: {text}"
    entries = [] if whole else getattr(getattr(longrepr, "reprtraceback", None), "reprentries", [])
    for lines in (getattr(entry, "lines", []) for entry in entries):
        first = next((at for at, line in enumerate(lines) if line.startswith("E ")), None)
        if first is not None:  # the lines of the error end an entry
            lines[first:] = [f"E   nanhunt: {text}"]


def without_machinery(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of torch and of nanhunt, which lie between the user's line and the stop."""
    if trace is None:
        return None
    rest = without_machinery(trace.tb_next)
    if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "nanhunt"):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def without_pages(error: BaseException) -> None:
    """Leave the first line of the notes that a watch has put on an error: a section holds the rest."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note.split("\n")[0] if str(note).startswith("nanhunt: ") else note for note in notes]


class Tally:
    """Counts over a whole run, from the reports of its tests, wherever they ran."""

    def __init__(self) -> None:
        self._tests: set[str] = set()
        self._watched: set[str] = set()
        self._bad: set[str] = set()
        self._close: set[str] = set()
        self._unsaved: dict[str, str] = {}
        self._files = 0
        self.asked = False  # some test was to be watched
        self._written: list[str] = []
        self._unwatched: dict[str, None] = {}

    def take(self, report: Any) -> None:
        """Count the report of one phase of a test."""
        # One that was skipped did not run; one whose set-up has failed did, and nothing of it was watched.
        if report.when == "call" or (report.when == "setup" and report.failed):
            self._tests.add(report.nodeid)
        told: dict[str, Any] | None = getattr(report, "nanhunt", None)
        if told is None:
            return
        self.asked = self.asked or told["asked"]
        if told["watched"] and report.when == "call":
            self._watched.add(report.nodeid)
        if told["titles"]:
            self._bad.add(report.nodeid)
        if told["close"]:
            self._close.add(report.nodeid)
        if told["unsaved"]:
            self._unsaved.setdefault(report.nodeid, told["unsaved"])
        self._files += told["files"]
        self._written += told["written"]
        self._unwatched.update(dict.fromkeys(told["unwatched"]))

    @property
    def ran(self) -> bool:
        """True when any test did."""
        return bool(self._tests)

    def lines(self, folder: str | None) -> list[str]:
        """What the end of a run says; nothing where nanhunt was not used."""
        said = []
        if self._watched or self._bad:
            tests, watched = len(self._tests | self._bad), len(self._watched | self._bad)
            line = f"nanhunt: {len(self._bad) or 'none'} of {tests} test{'s' * (tests != 1)} made a NaN or Inf"
            line += " in what was watched" if self._unwatched and not self._bad else ""
            line += f", {len(self._close)} came too close to the limit of a dtype" if self._close else ""
            if watched != tests:
                line += f" ({watched} watched)"
            said.append(line + (f"; reports in {folder}" if folder is not None and self._files else ""))
        if self._unsaved:
            node, why = next(iter(self._unsaved.items()))
            more = f" (and {len(self._unsaved) - 1} more)" if len(self._unsaved) > 1 else ""
            said.append(f"nanhunt: the report of {clean(node)}{more} could not be written: {clean(why)}")
        if self._written:
            files = sorted(set(self._written))
            said.append(f"nanhunt: ranges were written, review them: {', '.join(files)}")
        if self._unwatched:
            names = list(self._unwatched)
            more = f" (and {len(names) - _UNWATCHED} more)" if len(names) > _UNWATCHED else ""
            said.append("nanhunt: not watched: " + "; ".join(clean(one) for one in names[:_UNWATCHED]) + more)
        return said
