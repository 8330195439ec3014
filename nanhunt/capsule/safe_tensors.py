"""Blocks of numbers in a file that opens without running code: the safetensors format, read with every size checked.

`torch.load(weights_only=True)` runs no code either, but a file of 349 bytes can have it fill a gigabyte
(`bytearray(10**9)` is on its list of allowed calls); here a file never becomes more than its own size. The format is
that of the safetensors library, which reads these files; the few lines below need torch alone.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import UsageError

Tensor = torch.Tensor

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_DTYPES = {code: getattr(torch, name) for name, code in _CODES.items() if hasattr(torch, name)}
_MOST_HEADER = 1 << 20  # bytes
_MOST_DIMS = 64
# What Windows has not is not needed there.
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def code_of(dtype: torch.dtype) -> str | None:
    """The format's word for a dtype; None for one that it does not know, which travels as bytes."""
    code = _CODES.get(str(dtype).removeprefix("torch."))
    return code if code in _DTYPES else None


def write(path: Path, blocks: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors of a CPU.

    Raises:
        OSError: when the disk does not take them.
    """
    header: dict[str, Any] = {}
    at = 0
    ordered = sorted(blocks.items(), key=lambda item: -item[1].element_size())  # each begins where its numbers may
    for name, block in ordered:
        size = block.numel() * block.element_size()
        code = code_of(block.dtype)
        assert code is not None and block.is_contiguous() and block.is_cpu, name
        header[name] = {"dtype": code, "shape": list(block.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, block in ordered:
            if block.numel():
                file.write(block.detach().reshape(-1).view(torch.uint8).numpy().data)


def plain(path: Path) -> BinaryIO:
    """A file of anybody's, opened, when it is one: a link may lead anywhere, a pipe may never end.

    Raises:
        UsageError: for a link, a pipe, a folder, a device.
        OSError: when it cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _NO_LINK | _NO_WAIT | _BINARY)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        raise UsageError(f"this capsule is damaged: {path.name} is no plain file") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UsageError(f"this capsule is damaged: {path.name} is no plain file")
    return os.fdopen(handle, "rb")


def read(path: Path, *, most: int) -> dict[str, Tensor]:
    """The blocks of a file, which may come from anybody, in as many bytes of memory as the file has.

    Raises:
        UsageError: for a file that is larger than `most` bytes, or no whole file of this format, with the reason.
        OSError: when it cannot be read.
    """
    with plain(path) as file:
        there = os.fstat(file.fileno()).st_size
        if there > most:
            raise UsageError(
                f"{path.name} has {there / 1e6:.1f} MB, and at most {most / 1e6:.1f} MB are read: see --max-mb"
            )
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(there - 8, _MOST_HEADER):
            raise _damaged(path, "it does not begin with a header")
        text = file.read(length)
        rows = _rows(path, text, there - 8 - length)
        data = bytearray(there - 8 - length)
        if file.readinto(data) != len(data) or file.read(1):  # type: ignore[attr-defined]  # it may change meanwhile
            raise _damaged(path, "it is not as long as it was a moment ago")
    blocks: dict[str, Tensor] = {}
    for name, dtype, shape, start, end in rows:
        if start == end:
            blocks[name] = torch.empty([0] if 0 in shape else shape, dtype=dtype)
            continue
        part: Tensor = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start)
        if start % dtype.itemsize:  # a view of numbers must begin where one may stand
            raise _damaged(path, f"{name!r} does not begin at a multiple of its numbers' size")
        blocks[name] = part.view(dtype).view(shape)
    return blocks


_Row = tuple[str, torch.dtype, list[int], int, int]


def _rows(path: Path, text: bytes, room: int) -> list[_Row]:
    """The table of contents, when it covers the data without a gap or an overlap."""
    header = parsed(text)
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not JSON")
    rows: list[_Row] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            start, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _damaged(path, f"the entry of {name[:80]!r} is not understood") from None
        if not (isinstance(shape, list) and _whole((*shape, start, end)) and len(shape) <= _MOST_DIMS):
            raise _damaged(path, f"the sizes of {name[:80]!r} are not whole numbers")
        count = 1
        for size in shape:
            count *= size
        if end - start != count * dtype.itemsize or end > room:
            raise _damaged(path, f"{name[:80]!r} does not have the size that its header says")
        rows.append((name, dtype, shape, start, end))
    at = 0
    for _, _, _, start, end in sorted(rows, key=lambda row: row[3:]):
        if start != at:
            raise _damaged(path, "its parts overlap, or leave a gap")
        at = end
    if at != room:
        raise _damaged(path, "it is longer or shorter than its header says")
    return rows


def parsed(text: bytes) -> Any:
    """JSON that may come from anybody; None for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError among them; a thousand brackets
        return None


def _whole(values: Iterable[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path.name} is damaged, or no file of tensors: {why}")
