"""A file, or standard input, as lines of text: unpacked, decoded, cut to a size that fits, with its progress told."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from ..errors import UsageError

Progress = Callable[[int, "int | None"], None]

_CHUNK = 1 << 18
# A longer line is cut for reading: whatever a record is, it isn't that long.
LONGEST = 1 << 20
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_REFUSED = (
    (b"PK\x03\x04", "a zip archive (or a torch checkpoint): give the log file itself"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd: unpack it first (zstd -dc FILE | nanhunt log -)"),
    (b"\x89HDF", "an HDF5 file, which holds no log"),
    (b"PAR1", "a Parquet file: export it as CSV or JSON lines"),
    (b"SQLite format 3", "an SQLite database: export the metrics as CSV"),
)
_BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError)


class Source:
    """One file as text.

    Args:
        path: file, plain or packed by gzip, bzip2 or xz; "-" is standard input.
        progress: is called with the bytes done and the bytes there are (None where that is unknown).

    Attributes:
        remarks: what was odd: a packed file that breaks off, cut lines, binary lines.
        lines: number of lines read so far.

    Raises:
        UsageError: when the file cannot be read, or is of a kind that holds no log.
    """

    def __init__(self, path: str, *, progress: Progress | None = None) -> None:
        self.path = path
        self.lines = 0
        self.binary = 0
        self.cut = 0
        self.broken: str | None = None
        self._progress = progress
        self._told = 0.0
        self._raw: IO[bytes]
        self.total: int | None = None
        if path == "-":
            stream: IO[bytes] = (
                sys.stdin.buffer if hasattr(sys.stdin, "buffer") else io.BytesIO(sys.stdin.read().encode())
            )
            self._raw = stream
        else:
            try:
                self._raw = open(path, "rb")  # noqa: SIM115  (closed by `text`)
                self.total = os.fstat(self._raw.fileno()).st_size or None
            except FileNotFoundError:
                raise UsageError(f"{path}: no such file") from None
            except IsADirectoryError:
                raise UsageError(f"{path} is a folder: give the log file in it") from None
            except (OSError, ValueError) as error:
                raise UsageError(f"{path} cannot be read: {error}") from None
        self._done = 0
        self.start = self._take(_CHUNK)
        for magic, words in _REFUSED:
            if self.start.startswith(magic):
                self.close()
                raise UsageError(f"{path} is {words}")

    def close(self) -> None:
        """Lets the file go."""
        if self.path != "-":
            self._raw.close()

    def remarks(self) -> list[str]:
        """What was odd about the file, in sentences."""
        said = []
        if self.broken:
            said.append(f"The file breaks off ({self.broken}); what comes before was read.")
        if self.binary:
            said.append(
                f"{self.binary} {'line holds' if self.binary == 1 else 'lines hold'} no text and were left out."
            )
        if self.cut:
            said.append(
                f"{self.cut} {'line is' if self.cut == 1 else 'lines are'} longer than 1 MB and were cut for reading."
            )
        return said

    def text(self) -> Iterator[str]:
        """The decoded text, piece by piece."""
        try:
            pieces = self._bytes()
            first = next(pieces, b"")
            decoder = codecs.getincrementaldecoder(_encoding(first))(errors="replace")
            yield decoder.decode(first)
            for piece in pieces:
                yield decoder.decode(piece)
            yield decoder.decode(b"", final=True)
        finally:
            self.close()
            if self._progress:
                self._progress(self._done, self.total)

    def numbered(self, text: Iterator[str] | None = None) -> Iterator[tuple[int, str]]:
        """The lines with their numbers, counted from 1; binary ones are left out and counted."""
        rest = ""
        skipping = False
        for piece in self.text() if text is None else text:
            lines = piece.split("\n")
            if len(lines) > 1:
                lines[0] = rest + lines[0]
                rest = lines.pop()
                if skipping:  # the end of a line that was cut
                    lines.pop(0)
                    skipping = False
                    self.lines += 1
                odd = "\0" in piece or "\ufffd" in piece
                for line in lines:
                    self.lines += 1
                    if odd and (line := self._cleaned(line)) is None:  # type: ignore[assignment]
                        continue
                    if len(line) > LONGEST:
                        self.cut += 1
                        line = line[:LONGEST]
                    yield self.lines, line
            elif not skipping:
                rest += piece
            else:
                rest = ""
            if len(rest) > LONGEST and not skipping:
                self.cut += 1
                if (kept := self._cleaned(rest[:LONGEST])) is not None:
                    yield self.lines + 1, kept
                rest, skipping = "", True
        if skipping:
            self.lines += 1
        elif rest:
            self.lines += 1
            if (kept := self._cleaned(rest)) is not None:
                yield self.lines, kept

    def _cleaned(self, line: str) -> str | None:
        if "\0" not in line and "\ufffd" not in line:
            return line
        line = line.replace("\0", "")
        odd = sum(c == "\ufffd" or (c < " " and c not in "\t\r\b\x1b") for c in line[:4000])
        if odd * 10 > min(len(line), 4000) or not line:
            self.binary += 1
            return None
        return line

    def _take(self, size: int) -> bytes:
        piece = self._raw.read(size)
        self._done += len(piece)
        if self._progress:
            now = time.monotonic()
            if now - self._told >= 0.1:
                self._told = now
                self._progress(self._done, self.total)
        return piece

    def _bytes(self) -> Iterator[bytes]:
        """The bytes, unpacked; no piece is much larger than what was read, whatever a packed file unpacks to."""
        packed: Any = _Joined(self.start, self._take)
        stream: Any = packed
        if self.start.startswith(b"\x1f\x8b"):
            stream = gzip.GzipFile(fileobj=packed)
        elif self.start.startswith(b"BZh"):
            stream = bz2.BZ2File(packed)
        elif self.start.startswith(b"\xfd7zXZ\x00"):
            stream = lzma.LZMAFile(packed)  # noqa: SIM115  (the file below it is closed by `text`)
        while True:
            try:
                piece = stream.read(_CHUNK)
            except _BROKEN as error:
                self.broken = str(error) or type(error).__name__
                return
            if not piece:
                return
            yield piece


class _Joined(io.RawIOBase):
    """What was read ahead, and then the rest."""

    def __init__(self, start: bytes, more: Callable[[int], bytes]) -> None:
        self._start = start
        self._more = more

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        size = _CHUNK if size is None or size < 0 else size
        if self._start:
            piece, self._start = self._start[:size], self._start[size:]
            return piece
        return self._more(size)

    def seekable(self) -> bool:
        return False


def _encoding(start: bytes) -> str:
    for mark, name in _BOMS:
        if start.startswith(mark):
            return name
    # UTF-16 without a mark: every second byte of plain text is zero.
    some = start[:2000]
    if len(some) >= 8:
        if some[1::2].count(0) > 0.4 * len(some) and some[::2].count(0) < 0.05 * len(some):
            return "utf-16-le"
        if some[::2].count(0) > 0.4 * len(some) and some[1::2].count(0) < 0.05 * len(some):
            return "utf-16-be"
    return "utf-8"
