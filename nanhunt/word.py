"""The word that child processes leave for the one that started them: a line of what each has found."""

from __future__ import annotations

import json
import os
import secrets
import tempfile


class Word:
    """A file that is not there before a child has something to tell, and gone when it has been heard.

    Args:
        path: the file, as a parent has named it; None for a name of its own.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or _new()
        self._left: int | None = None
        self._heard: list[str] = []

    def leave(self, line: str) -> None:
        """Tell the parent, once for each process; nothing is raised when that cannot be done."""
        if self._left == os.getpid():
            return
        self._left = os.getpid()
        try:
            # One write each, at the end, so that the lines of several stay whole.
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(file, json.dumps(line).encode("ascii") + b"\n")
            finally:
                os.close(file)
        except OSError:  # a full disk: the report and the lines on stderr still tell it
            pass

    def heard(self) -> list[str]:
        """All that was left until now."""
        try:
            with open(self.path, "rb") as file:
                lines = file.read().splitlines()
            os.unlink(self.path)
        except OSError:
            return self._heard
        for line in lines:
            try:
                self._heard.append(str(json.loads(line)))
            except ValueError:  # half a line, of a child that was killed or had no room
                continue
        return self._heard


def _new() -> str:
    """A name that nobody else has; empty where there is no folder for it, and then no word is left."""
    before = tempfile.tempdir
    try:
        return os.path.join(tempfile.gettempdir(), f"nanhunt-{os.getpid()}-{secrets.token_hex(8)}")
    except OSError:
        return ""
    finally:
        tempfile.tempdir = before  # a program may set TMPDIR before it asks for the first time
