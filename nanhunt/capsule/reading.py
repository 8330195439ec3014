"""A capsule from anybody, opened: no code runs, and no more memory is taken than the files have, up to a cap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..finding import Finding
from . import safe_tensors
from .unpacked import Unpacked
from .writing import FINDING, FORMAT, MANIFEST, TENSORS

MOST_MB = 4096.0
_MOST_TEXT = 1 << 22  # bytes of each text
_MOST_BATCHES = 64
_FLOATS = ("float64", "float32", "float16", "bfloat16")


class Piece:
    """The values of one moment: facts about it, and trees of values that are made when they are asked for."""

    def __init__(self, part: Any, blocks: Mapping[str, torch.Tensor], *, most: int, device: str) -> None:
        if not isinstance(part, dict) or not all(isinstance(part.get(key), dict) for key in ("facts", "trees")):
            raise _damaged("a part of its manifest is none")
        self.facts = part["facts"]
        self._trees = part["trees"]
        self._unpacked = Unpacked(part.get("rows"), blocks, most=most, device=device)

    def __contains__(self, name: str) -> bool:
        return name in self._trees

    def value(self, name: str, kind: type | None = None) -> Any:
        """What was taken under this name.

        Raises:
            UsageError: when it is not in the capsule, or is something else.
        """
        if name not in self._trees:
            raise _damaged(f"it has no {name!r}")
        value = self._unpacked.value(self._trees[name])
        if kind is not None and not isinstance(value, kind):
            raise _damaged(f"its {name!r} is a {type(value).__name__}")
        return value

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call."""
        given = self.value("call", dict)
        args, kwargs = given.get("args"), given.get("kwargs")
        if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(isinstance(k, str) for k in kwargs):
            raise _damaged("its call has no arguments")
        return args, kwargs

    def state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the module, by name."""
        found: dict[str, torch.Tensor] = self.value("state", dict)
        if not all(isinstance(k, str) and isinstance(t, torch.Tensor) for k, t in found.items()):
            raise _damaged("its parameters are none")
        return found

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients that came back, by the place of the output among the tensors that the call gave."""
        found: dict[int, torch.Tensor] = {}
        for name in self._trees:
            word, _, at = name.partition(" ")
            if word == "gradient" and at.isdecimal() and len(at) < 6:
                found[int(at)] = self.value(name, torch.Tensor)
        return found

    def word(self, name: str, legal: tuple[str, ...]) -> str:
        value = self.facts.get(name)
        if value not in legal or not isinstance(value, str):
            raise _damaged(f"{name!r} is {str(value)[:40]!r}")
        return value

    def text(self, name: str) -> str | None:
        value = self.facts.get(name)
        if value is not None and (not isinstance(value, str) or len(value) > 1000):
            raise _damaged(f"{name!r} is no text")
        return value

    def flag(self, name: str) -> bool:
        return self.facts.get(name) is True

    def casts(self) -> dict[str, str]:
        """What autocast casts to, by kind of device."""
        casts = self.facts.get("autocast", {})
        if not isinstance(casts, dict) or not all(k in ("cpu", "cuda") and v in _FLOATS for k, v in casts.items()):
            raise _damaged("its autocast is none")
        return casts

    def training(self) -> dict[str, bool]:
        modes = self.facts.get("training", {})
        if not isinstance(modes, dict) or not all(isinstance(v, bool) for v in modes.values()):
            raise _damaged("its training flags are none")
        return modes


class Opened:
    """The files of a capsule, read and checked.

    Args:
        path: the folder.
        max_mb: megabytes of tensors that are read.
        device: where they are put.

    Raises:
        UsageError: for what is no capsule, is damaged, or is larger than that.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_mb: float = MOST_MB, device: str = "cpu") -> None:
        try:
            torch.empty(0, device=device)
        except Exception as error:
            raise UsageError(f"device={device!r} cannot be used here: {str(error).splitlines()[0][:200]}") from None
        self.folder = Path(path)
        self.most = int(max_mb * 1e6)
        try:
            if not self.folder.is_dir():
                there = "is a file" if self.folder.exists() else "is not there"
                raise UsageError(f"{str(path)!r} {there}: name the folder of a capsule, which holds {MANIFEST}")
            if not (self.folder / MANIFEST).exists():
                inside = sorted(one.parent.name for one in self.folder.glob(f"[!.]*/{MANIFEST}"))[:3]
                hint = f"; inside it there is {', '.join(inside)}" if inside else ""
                raise UsageError(f"{str(path)!r} holds no {MANIFEST}: name the folder of a capsule{hint}")
            manifest = self._text(MANIFEST)
            if manifest.get("format") != FORMAT:
                raise UsageError(
                    f"this capsule has format {str(manifest.get('format'))[:20]}, and this nanhunt reads {FORMAT}: "
                    "replay it with the version that wrote it, or upgrade nanhunt"
                )
            self.finding = Finding.from_dict(self._text(FINDING))
            blocks = safe_tensors.read(self.folder / TENSORS, most=self.most)
        except OSError as error:
            raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
        parts = manifest.get("parts")
        if not isinstance(parts, dict) or len(parts) > _MOST_BATCHES + 2:
            raise _damaged("its manifest has no parts")
        pieces = {name: Piece(part, blocks, most=self.most, device=device) for name, part in parts.items()}
        self.call, self.op = pieces.get("call"), pieces.get("op")
        self.batches = [pieces[name] for name in _texts(manifest, "batches") if name in pieces]
        self.left_out, self.missing = _texts(manifest, "left_out"), _texts(manifest, "missing")
        self.hashes: list[Any] = manifest["hashes"] if isinstance(manifest.get("hashes"), list) else []
        self.versions: dict[str, Any] = manifest["versions"] if isinstance(manifest.get("versions"), dict) else {}

    def _text(self, name: str) -> dict[str, Any]:
        with safe_tensors.plain(self.folder / name) as file:
            text = file.read(_MOST_TEXT + 1)
        if len(text) > _MOST_TEXT:
            raise _damaged(f"{name} has more than {_MOST_TEXT >> 20} MB")
        value = safe_tensors.parsed(text)
        if not isinstance(value, dict):
            raise _damaged(f"{name} is not JSON")
        return value


def _texts(manifest: dict[str, Any], name: str) -> list[str]:
    value = manifest.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _damaged(f"its {name!r} is no list of texts")
    return value


def _damaged(why: str) -> UsageError:
    return UsageError(f"this capsule is damaged: {why}")
