"""The one place that opens files: written whole or not at all, read back as findings or courses."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..finding import Finding

if TYPE_CHECKING:
    from ..symptoms.course import Course

_Record = TypeVar("_Record")
MAX_MB = 256.0  # of a capsule, unless something else is asked for
MOST_RING = 64  # batches


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Writes `text` to `path`, folders included; whatever interrupts it, no half-written file is left.

    Several ranks may write the same path at the same time: the last one stands.
    """
    # A link keeps pointing where it did: it is its target that is replaced.
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UsageError(f"cannot write a report to {str(path)!r}: it is a folder; name a file in it")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A module may bear a name that no encoding takes (a lone surrogate); the report of it must not fail.
    data = text.encode("utf-8", errors="backslashreplace")
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe: nothing there to replace
        target.write_bytes(data)
        return target
    draft = target.with_name(f".{target.name[:80]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        draft.write_bytes(data)
        if target.exists():
            draft.chmod(target.stat().st_mode & 0o7777)
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return target


def try_folder(folder: str | os.PathLike[str]) -> None:
    """Make a folder that will be written to, and see that it can be: before the work whose results go there.

    Raises:
        UsageError: when it cannot be made or written to, with the reason.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".nanhunt-"):
            pass
    except FileExistsError:
        raise UsageError(f"cannot write into {str(folder)!r}: it is a file, name a folder") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write into {str(folder)!r}: {getattr(error, 'strerror', None) or error}") from None


def try_file(path: str | os.PathLike[str]) -> None:
    """The same of a file that `write_whole` will write; what it holds now stays.

    Raises:
        UsageError: when it cannot be written, with the reason.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise UsageError(f"cannot write to {str(path)!r}: it is a folder; name a file in it")
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe
        if not os.access(target, os.W_OK):
            raise UsageError(f"cannot write to {str(path)!r}: permission denied")
        return
    try_folder(target.parent)


def in_folder(folder: str) -> list[str]:
    """The files of findings in a folder of reports, as the launcher, the callbacks and pytest write them.

    Raises:
        UsageError: when there is none.
    """
    there = sorted(path for path in Path(folder).glob("*.json") if path.is_file())
    if not there:
        raise UsageError(f"{folder!r} is a folder without a .json file in it: name a file of findings")
    return [str(path) for path in there if path.name.startswith("finding")] or [str(path) for path in there]


def read_findings(path: str | os.PathLike[str]) -> list[Finding]:
    """The findings of a file: one, a list of them, or one on each line; `-` is standard input.

    Raises:
        UsageError: when it holds none, or something else.
        OSError: when it cannot be read.
    """
    return [_told(path, Finding.from_dict, item) for item in _items(path)]


def read_saved(path: str | os.PathLike[str]) -> list[Finding | Course]:
    """The same of a file that may hold courses, too, as `nanhunt log --json` writes them.

    Raises:
        UsageError: when it holds neither.
        OSError: when it cannot be read.
    """
    from ..symptoms.course import Course  # loaded when it is wanted: most files hold findings

    read: list[Finding | Course] = []
    for item in _items(path):
        if isinstance(item, dict) and "nanhunt_course" in item:
            read.append(_told(path, Course.from_dict, item))
        else:
            read.append(_told(path, Finding.from_dict, item))
    return read


def _told(path: str | os.PathLike[str], made: Callable[[Any], _Record], item: object) -> _Record:
    if isinstance(item, dict) and "nanhunt_steps" in item:
        raise UsageError(f"{str(path)!r} is the record of a run, not a finding: nanhunt log {shlex.quote(str(path))}")
    try:
        return made(item)
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error


def _items(path: str | os.PathLike[str]) -> list[object]:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is not text") from error
    try:
        try:
            read = json.loads(text)
        except ValueError:
            read = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is not JSON ({error})") from error
    if not text.strip():
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is empty")
    return read if isinstance(read, list) else [read]


@contextlib.contextmanager
def whole_folder(folder: str | os.PathLike[str], name: str) -> Iterator[tuple[Path, list[Path]]]:
    """A draft to fill, which becomes `folder/name` at the end of the block; whatever interrupts it, nothing does.

    Where the name is taken, by an earlier run or another process, `name-2` is, and so on. Gives the draft, and a list
    that holds the path it was put at after the block.

    Raises:
        OSError: when it cannot be written.
    """
    parent = Path(os.path.realpath(folder))
    parent.mkdir(parents=True, exist_ok=True)
    draft = parent / f".{name[:80]}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    placed: list[Path] = []
    try:
        draft.mkdir()
        yield draft, placed
        nth = 1
        while not placed:
            target = parent / (name if nth == 1 else f"{name}-{nth}")
            nth += 1
            if os.path.lexists(target):
                continue
            try:
                os.rename(draft, target)  # onto a folder that another has just put there, it fails
            except OSError:
                if not os.path.lexists(target):
                    raise
            else:
                placed.append(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
