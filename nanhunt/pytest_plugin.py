"""The pytest plugin: fixture `nanhunt`, marker `nanhunt`, `--nanhunt` and its options. It only wires."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import pytest_settings as asked
from .errors import NonFiniteError, UsageError, enabled
from .finding import Finding
from .pytest_precision import PrecisionParts, assert_close_precision
from .pytest_reports import Tally, save, save_shortage, shorten, shown, without_machinery, without_pages
from .pytest_trial import Hunting, Place, Trial
from .ranges import RangesChanged
from .report.files import try_folder

__all__ = ["PrecisionParts", "assert_close_precision", "nanhunt"]

_SESSION = pytest.StashKey[asked.Settings]()
# The folders that were asked for, and not only by an ini file for the runs that use them.
_WRITES = pytest.StashKey[list[str]]()
_TRIAL = pytest.StashKey[Trial]()
_SHOWN = 3  # findings of one test that become sections

_MARKER = (
    "nanhunt({arguments}): watch every model that this test calls, and fail it when it makes a NaN or an Inf. "
    "on=False leaves it out of --nanhunt; headroom_bits=2 fails it also when a number of any module comes closer than "
    'two bits to the limit of its dtype, or of dtype="float16". The arguments are the options of --nanhunt; a test '
    "that uses the fixture `nanhunt` is watched by what it opens, unless on=True."
)
_GROUP = "nanhunt: where the first NaN or Inf of a test was made"
_TWINS = (
    "watch every model that is called in every test, and fail a test that makes a NaN or an Inf. Each option of this "
    "group has a twin in the environment (NANHUNT_DETAIL=op; NANHUNT_PYTEST=1 for this one), in the ini file "
    "(nanhunt_detail = op; nanhunt = true for this one), and most as an argument of the marker nanhunt. A marker goes "
    "before the command line, that before the environment, that before the ini file. NANHUNT=0 turns all of it off"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanhunt", _GROUP)
    for name, setting in asked.SETTINGS.items():
        if name == "on":
            group.addoption(
                asked.flag(name), dest="nanhunt_on", action="store_const", const=True, default=None, help=_TWINS
            )
        else:
            group.addoption(
                asked.flag(name),
                dest=asked.ini(name),
                type=_argument(name),
                default=None,
                metavar=setting.metavar,
                help=setting.help,
            )
        kind: Any = "bool" if name == "on" else "args" if name in ("kinds", "allow") else "string"
        parser.addini(asked.ini(name), f"{setting.help} ({asked.flag(name)})", type=kind, default=None)
    group.addoption(
        "--nanhunt-update",
        dest="nanhunt_update",
        action="store_true",
        help="write the files of nanhunt.check_ranges anew: review the difference, and commit it",
    )


def _argument(name: str) -> Any:
    def read(text: str) -> Any:
        try:
            return asked.SETTINGS[name].read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not known: {error}") from None

    return read


def _ini(config: pytest.Config, name: str) -> Any:
    """A value of the ini file. What pytest itself refuses, such as a boolean that is none, it calls by no name."""
    try:
        return config.getini(name)
    except (pytest.UsageError, TypeError, ValueError) as error:
        legal = ": use true or false" if name == asked.ini("on") else ""
        raise UsageError(f"{name} in the ini file: {error}{legal}") from None


def pytest_configure(config: pytest.Config) -> None:
    arguments = ", ".join(f"{name}=..." for name in asked.NAMES if name not in asked.NOT_IN_MARKERS)
    config.addinivalue_line("markers", _MARKER.format(arguments=arguments))
    here, home = config.invocation_params.dir, config.inipath.parent if config.inipath else config.rootpath
    try:
        enabled()
        line = asked.of_command_line(config.getoption)
        above = line.over(asked.of_environment(os.environ))
        session = above.inside(here).over(asked.of_ini(functools.partial(_ini, config)).inside(home))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SESSION] = session
    config.stash[_WRITES] = [
        name for name in asked.FOLDERS if enabled() and getattr(session if session.on else above, name) is not None
    ]
    idle = [asked.flag(name) for name in asked.NAMES if name != "on" and getattr(line, name) is not None]
    config.pluginmanager.register(_End(session, here, idle), "nanhunt-end")


def pytest_sessionstart(session: pytest.Session) -> None:
    """A folder that reports or capsules cannot go to ends the run before its tests, and not in one of them."""
    for name in session.config.stash[_WRITES] if not session.config.getoption("collectonly") else ():
        try:
            try_folder(getattr(session.config.stash[_SESSION], name))
        except UsageError as error:
            raise pytest.UsageError(f"{asked.flag(name)}: {error}") from None


class _End:
    """Counts the reports of all tests, wherever they ran, and says the last line."""

    def __init__(self, session: asked.Settings, here: Path, idle: list[str]) -> None:
        self._tally, self._on, self._idle = Tally(), bool(session.on), idle
        self._folder = None if session.report is None else shown(Path(session.report), here)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tally.take(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self._tally.lines(self._folder)
        if not enabled():
            off = "nanhunt: no test was watched: switched off by NANHUNT=0"
            lines = [off] if self._on or self._tally.asked else []
        elif self._idle and self._tally.ran and not (self._on or self._tally.asked):
            of, s = ", ".join(self._idle), "s" * (len(self._idle) == 1)
            lines = [f"nanhunt: no test was watched: {of} need{s} --nanhunt, the marker nanhunt or the fixture nanhunt"]
        if lines:
            terminalreporter.section("nanhunt")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_report_header(config: pytest.Config) -> str | None:
    session = config.stash[_SESSION]
    if not session.on:
        return None
    return f"nanhunt: {asked.told(session)}" if enabled() else "nanhunt: switched off by NANHUNT=0"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item):
            try:
                asked.of_markers(item.iter_markers("nanhunt"))
            except UsageError as error:  # as an unknown marker does; a pytest.UsageError is lost in a worker of xdist
                raise pytest.Collector.CollectError(f"{item.nodeid}: {error}") from None
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    session = item.config.stash[_SESSION]
    try:
        marker = asked.of_markers(item.iter_markers("nanhunt"))
    except UsageError as error:  # of a marker that was added after the collection
        pytest.fail(str(error), pytrace=False)
    item.stash[_TRIAL] = Trial(
        session if marker is None else marker.over(session),
        Place(file=item.path, test=".".join(item.nodeid.split("::")[1:]), root=item.config.rootpath),
        watched=asked.watched(marker, session, has_fixture="nanhunt" in getattr(item, "fixturenames", ())),
        update=item.config.getoption("nanhunt_update"),
    )


@pytest.fixture
def nanhunt(request: pytest.FixtureRequest) -> Iterator[Hunting]:
    """Every public name of nanhunt, with the settings of this test; `check_ranges` guards the ranges of a model."""
    trial = request.node.stash[_TRIAL]
    trial.hunting = Hunting(trial)
    yield trial.hunting
    trial.hunting.leave(None, None, None)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """`assert nanhunt.hunt(...) is None` says in its one line what was found."""
    if op in ("is", "==") and isinstance(left, Finding) and right is None:
        return [f"nanhunt: {left.title()}"]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    trial = item.stash[_TRIAL]
    with trial.running():
        result = yield
    failure = trial.verdict()
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    error = None if call.excinfo is None else call.excinfo.value
    if error is not None:
        without_pages(error)
    if call.excinfo is not None and isinstance(error, NonFiniteError) and not item.config.getoption("fulltrace"):
        kept = without_machinery(call.excinfo.tb)
        if kept is not None:
            call.excinfo.traceback = type(call.excinfo.traceback)(kept)
    report = yield
    trial = item.stash.get(_TRIAL, None)
    if trial is not None:
        _tell(report, trial, item, error)
    return report


def _tell(report: pytest.TestReport, trial: Trial, item: pytest.Item, error: BaseException | None) -> None:
    found = trial.faults(error) if report.failed or trial.only_warns else []
    shortage = trial.shortage if report.failed and report.when == "call" else None
    hunting, folder = trial.hunting, item.config.stash[_SESSION].report
    told: dict[str, Any] = {
        "asked": trial.asked or hunting is not None,
        "watched": trial.watched or (hunting is not None and enabled()),
        "titles": [finding.title() for finding in found],
        "close": shortage is not None,
        "files": 0,
        "unsaved": "",
        "written": hunting.written if hunting is not None else [],
        "unwatched": trial.unwatched(),
    }
    for finding in found[:_SHOWN]:
        report.sections.append(("nanhunt", str(finding)))
    if shortage is not None:
        report.sections.append(("nanhunt", shortage.page()))
    if found or shortage is not None:
        item.user_properties.append(("nanhunt", found[0].title() if found else str(trial.failure)))
    if folder is not None:
        try:
            if found:
                told["files"] += len(save(Path(folder), item.nodeid, found))
            if shortage is not None:
                told["files"] += bool(save_shortage(Path(folder), item.nodeid, shortage))
        except Exception as failure:  # a full disk must not cost the failures of this test and of those after it
            told["unsaved"] = str(getattr(failure, "strerror", None) or failure)
    if isinstance(error, NonFiniteError):
        shorten(report.longrepr, error.finding.title(), whole=False)
    elif isinstance(error, RangesChanged) or (report.failed and trial.failure is not None and report.when == "call"):
        shorten(report.longrepr, trial.failure or str(error), whole=True)
    report.nanhunt = told  # type: ignore[attr-defined]  # pytest and xdist carry what stands on a report
