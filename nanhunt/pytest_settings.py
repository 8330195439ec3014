"""What a test asks for: its marker, then the command line, the environment and the ini file, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import UsageError
from .ranges import form_of
from .verdict import KINDS

_LEGAL = {
    "on_hit": ("raise", "record", "warn"),
    "detail": ("auto", "module", "op"),
    "stop": ("confirmed", "first"),
    "compiled": ("error", "eager", "retrace"),
}
_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_OF_WATCH = ("detail", "stop", "kinds", "allow", "compiled", "capsule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked for; None where nothing is said."""

    on: bool | None = None
    on_hit: str | None = None
    detail: str | None = None
    stop: str | None = None
    kinds: tuple[str, ...] | None = None
    allow: tuple[str, ...] | None = None
    compiled: str | None = None
    headroom_bits: float | None = None
    dtype: str | None = None
    report: str | None = None
    capsule: str | None = None

    def over(self, below: Settings) -> Settings:
        """These settings, and where they say nothing, those of `below`."""
        said = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return replace(below, **said)

    def of_watch(self) -> dict[str, Any]:
        """The options of `nanhunt.watch` among them, those that are said."""
        return {name: value for name in _OF_WATCH if (value := getattr(self, name)) is not None}

    def inside(self, folder: Path) -> Settings:
        """The same, with the folders of reports and capsules as seen from `folder`."""
        said: dict[str, Any] = {
            name: str(folder / there) for name in FOLDERS if (there := getattr(self, name)) is not None
        }
        return replace(self, **said) if said else self


NAMES = tuple(field.name for field in fields(Settings))


# --- one value ----------------------------------------------------------------------------------------------


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.strip().lower() not in _FLAGS:
        raise UsageError("use true or false")
    return _FLAGS[value.strip().lower()]


def _word(name: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in _LEGAL[name]:
            raise UsageError(f"use one of {', '.join(_LEGAL[name])}")
        return str(value)

    return read


def _words(value: Any) -> tuple[str, ...]:
    """Words of a text, separated by commas or spaces, or those of a list."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple, set, frozenset)) or not all(isinstance(part, str) for part in parts):
        raise UsageError("give a word, or several with commas between them")
    words = tuple(word for part in parts for word in re.split(r"[,\s]+", part) if word)
    if not words:
        raise UsageError("name at least one")
    return words


def _kinds(value: Any) -> tuple[str, ...]:
    words = _words(value)
    if not set(words) <= set(KINDS):
        raise UsageError(f"use some of {', '.join(KINDS)}")
    return words


def _bits(value: Any) -> float:
    try:
        bits = float(value)
    except (TypeError, ValueError):
        bits = float("nan")
    if isinstance(value, bool) or not 0 <= bits < 1000:
        raise UsageError("give a number of bits, 0 or more, such as 2")
    return bits


def _dtype(value: Any) -> str:
    try:
        return form_of(value).name
    except UsageError as error:
        raise UsageError(str(error).partition(": ")[2]) from None


def _folder(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UsageError("name a folder")
    return str(os.fspath(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that may be asked for: how its value is read, and what the help says."""

    read: Callable[[Any], Any]
    metavar: str
    help: str


SETTINGS: dict[str, Setting] = {
    "on": Setting(read=_flag, metavar="", help="watch every model that is called in every test"),
    "detail": Setting(
        read=_word("detail"),
        metavar="LEVEL",
        help="module (cheap), op (every operation, slow), or auto: modules, and the operation where it can be had",
    ),
    "stop": Setting(
        read=_word("stop"),
        metavar="WHEN",
        help="confirmed: when a bad value has done harm; first: where it is born",
    ),
    "kinds": Setting(read=_kinds, metavar="KINDS", help="what counts: some of nan,+inf,-inf (all by default)"),
    "allow": Setting(
        read=_words, metavar="PATTERNS", help="patterns of module paths that may make them, such as '*.mask,head'"
    ),
    "compiled": Setting(
        read=_word("compiled"),
        metavar="HOW",
        help="of compiled models that ran before: error: they are not watched, and it is said; eager: run them eagerly "
        "in the tests; retrace: compile them once more with the checks",
    ),
    "on_hit": Setting(
        read=_word("on_hit"),
        metavar="HOW",
        help="of --nanhunt: raise stops the test there, record fails it at its end, warn only warns",
    ),
    "headroom_bits": Setting(
        read=_bits,
        metavar="BITS",
        help="in watched tests: fail when a number of any module comes closer to the limit of its dtype than this",
    ),
    "dtype": Setting(read=_dtype, metavar="DTYPE", help="hold headroom against this dtype, such as float16"),
    "report": Setting(read=_folder, metavar="DIR", help="write a page (HTML) and the JSON of each fault into DIR"),
    "capsule": Setting(
        read=_folder, metavar="DIR", help="keep a capsule of each fault in a new folder inside DIR, for nanhunt replay"
    ),
}
FOLDERS = NOT_IN_MARKERS = ("report", "capsule")


def flag(name: str) -> str:
    """The command-line option of a setting."""
    return "--nanhunt" if name == "on" else "--nanhunt-" + name.replace("_", "-")


def ini(name: str) -> str:
    """The ini option of a setting."""
    return "nanhunt" if name == "on" else f"nanhunt_{name}"


def variable(name: str) -> str:
    """The environment variable of a setting: NANHUNT itself is the switch of all of nanhunt."""
    return "NANHUNT_PYTEST" if name == "on" else f"NANHUNT_{name.upper()}"


def told(session: Settings) -> str:
    """What holds for every test, in one line."""
    said = [f"{name} {_text(value)}" for name in NAMES[1:] if (value := getattr(session, name)) is not None]
    return "every test is watched" + (f" ({', '.join(said)})" if said else "")


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


# --- the four sources -----------------------------------------------------------------------------------------


def of_command_line(option: Callable[[str], Any]) -> Settings:
    """The settings of the command line; `option` gives the text of one, or None."""
    return _read({name: option(ini(name) + "_on" * (name == "on")) for name in NAMES}, flag)


def of_environment(environ: Mapping[str, str]) -> Settings:
    """The settings of the environment; an empty variable says nothing."""
    return _read({name: environ.get(variable(name)) or None for name in NAMES}, variable)


def of_ini(value: Callable[[str], Any]) -> Settings:
    """The settings of the ini file; an empty value says nothing.

    Raises:
        UsageError: for a value that is not legal.
    """
    given = {name: value(ini(name)) for name in NAMES}
    return _read({name: None if text in ("", []) else text for name, text in given.items()}, ini)


def of_markers(markers: Iterable[Any]) -> Settings | None:
    """The settings of the markers of a test, the closest first; None when it has none.

    Raises:
        UsageError: for an argument that does not exist, one without a name, or a value that is not legal.
    """
    found: Settings | None = None
    legal = [name for name in NAMES if name not in NOT_IN_MARKERS]
    for marker in markers:
        if marker.args:
            raise UsageError(f"@pytest.mark.nanhunt takes named arguments only, got {marker.args[0]!r}")
        for name in marker.kwargs:
            if name not in legal:
                raise UsageError(f"@pytest.mark.nanhunt has no argument {name!r}: use {', '.join(legal)}")
        one = _read(marker.kwargs, lambda name: f"@pytest.mark.nanhunt: {name}")
        found = one if found is None else found.over(one)
    return found


def _read(given: Mapping[str, Any], called: Callable[[str], str]) -> Settings:
    values = {}
    for name, value in given.items():
        if value is None:
            continue
        try:
            values[name] = SETTINGS[name].read(value)
        except UsageError as error:
            raise UsageError(f"{called(name)}={value!r} is not known: {error}") from None
    return Settings(**values)


def watched(marker: Settings | None, session: Settings, *, has_fixture: bool) -> bool:
    """Whether every model that a test calls is watched without its doing.

    A test that asks for the fixture is in charge itself, unless its marker says `on=True`. Any other is watched
    when its marker says so, which a marker without `on` does, else when the session says so.
    """
    if marker is not None and marker.on is not None:
        return marker.on
    if has_fixture:
        return False
    return marker is not None or bool(session.on)
