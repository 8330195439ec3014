"""The one place that opens files: written whole or not at all, read back as findings."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from ..errors import UsageError
from ..finding import Finding


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


def read_findings(path: str | os.PathLike[str]) -> list[Finding]:
    """The findings of a file: one, a list of them, or one on each line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is not text") from error
    try:
        try:
            data = json.loads(text)
        except ValueError:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is not JSON ({error})") from error
    if not text.strip():
        raise UsageError(f"{str(path)!r} holds no nanhunt findings: it is empty")
    try:
        return [Finding.from_dict(item) for item in (data if isinstance(data, list) else [data])]
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from error
