"""The gradients of one step, measured before they are used: norms, what clipping left of them, and a few entries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..numerics import format_of
from . import shares
from .gradients import norms, numbers_of, sample
from .readback import Numbers, Readback

Tensor = torch.Tensor
Name = Callable[[Tensor], str]

_FAINT = 1e-6  # of the norm of all gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Gradients that were measured at one moment."""

    ids: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    scaled: bool  # they still stood multiplied by the loss scale


@dataclass(frozen=True, slots=True)
class _Clip:
    """What one call of `clip_grad_norm_` has done to which gradients."""

    ids: frozenset[int]
    max_norm: float
    known: bool  # by how much it scaled them down


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """The gradients of one step by exponent, without the loss scale; `dtype` is the narrowest they were computed in."""

    histogram: dict[int, float]
    absmax: float
    largest: str
    dtype: str


class Measured:
    """Takes each gradient once, as small tensors for `reads`; what they say is worked out when they have been read."""

    def __init__(self, reads: Readback, *, sampled: bool) -> None:
        self._reads, self._sampled = reads, sampled
        self._chunks: list[_Chunk] = []
        self._ids: set[int] = set()
        self._clips: list[_Clip] = []
        self._entries: list[tuple[list[shares.Part], bool, str]] = []
        self._peaks: list[tuple[tuple[str, ...], bool]] = []
        self.clipped_scaled: bool | None = None

    def forget(self) -> None:
        """The gradients have grown since they were measured."""
        self._ids.clear()
        self._chunks.clear()
        self._peaks.clear()
        self._entries.clear()

    def take(self, params: Iterable[Tensor], name: Name, *, scaled: bool, wide: bool = False) -> None:
        """Take the norms of gradients, each of them once in a step, and in a sampled step some of their entries.

        `wide` for gradients that the loss scale has made so large that their squares leave float32.
        """
        ids, names, grads = [], [], []
        for p in params:
            if p.grad is None or id(p) in self._ids:
                continue
            numbers = numbers_of(p.grad)
            if numbers is not None:
                ids.append(id(p))
                names.append(name(p))
                grads.append(numbers)
        if not ids:
            return
        self._ids.update(ids)
        for which, made in norms(grads, wide=wide):
            self._reads.add(("norms", len(self._chunks)), made)
            chunk = _Chunk(
                ids=tuple(ids[i] for i in which),
                names=tuple(names[i] for i in which),
                sizes=tuple(grads[i].numel() for i in which),
                scaled=scaled,
            )
            self._chunks.append(chunk)
        if not self._sampled:
            return
        for which, peaks in norms(grads, float("inf")):
            self._reads.add(("absmax", len(self._peaks)), peaks)
            self._peaks.append((tuple(names[i] for i in which), scaled))
        for dtype, parts, numbers in sample((name, grad, grad) for name, grad in zip(names, grads)):
            self._reads.add(("entries", len(self._entries)), numbers)
            self._entries.append((parts, scaled, str(dtype).removeprefix("torch.")))

    def clip(self, params: Iterable[Tensor], max_norm: float, total_norm: Any, *, scaled: bool) -> None:
        """Gradients that were taken are about to be scaled down together."""
        known = type(total_norm) is Tensor and total_norm.numel() == 1
        if known:
            self._reads.add(("clip", len(self._clips)), total_norm)
        self._clips.append(_Clip(frozenset(map(id, params)), float(max_norm), known))
        self.clipped_scaled = scaled or bool(self.clipped_scaled)

    def keys(self) -> list[Hashable]:
        """Where the norms stand among the numbers that are read."""
        return [("norms", i) for i in range(len(self._chunks))]

    def norms(self, values: dict[Hashable, Numbers], scale: float | None) -> dict[str, Any]:
        """The fields of the record that come from the norms, without the loss scale."""
        if not self._chunks:
            return {}
        before = after = 0.0
        names: list[str] = []
        sizes: list[float] = []
        shrink: dict[int, float] = {}
        for i, clip in enumerate(self._clips):
            if clip.known:
                with np.errstate(invalid="ignore"):
                    factor = float(np.minimum(clip.max_norm / (np.float64(values["clip", i][0]) + 1e-6), 1.0))
                for key in clip.ids:
                    shrink[key] = shrink.get(key, 1.0) * factor
        with np.errstate(over="ignore", invalid="ignore"):
            for i, chunk in enumerate(self._chunks):
                made = values["norms", i].astype(np.float64)
                if chunk.scaled and scale:
                    made = made / scale
                before += float(np.square(made).sum())
                left = made * np.array([shrink.get(key, 1.0) for key in chunk.ids]) if shrink else made
                after += float(np.square(left).sum())
                names += chunk.names
                sizes += made.tolist()
        fields: dict[str, Any] = {"grad_norm": before**0.5, "clipped_scaled": self.clipped_scaled}
        if self._clips and all(clip.known for clip in self._clips):
            fields["clipped_norm"] = after**0.5
        bad = [name for name, size in zip(names, sizes) if not np.isfinite(size)]
        if bad:
            fields["worst"] = bad[-1]  # backward comes to the last one first
        elif self._sampled:
            fields["worst"] = names[int(np.argmax(sizes))]
            numels = np.array([numel for chunk in self._chunks for numel in chunk.sizes])
            faint = numels[np.array(sizes) < _FAINT * before**0.5].sum()
            fields["faint"] = float(faint / max(numels.sum(), 1))
        return fields

    def entries(
        self, values: dict[Hashable, Numbers], scale: float | None, autocast: str | None
    ) -> tuple[shares.Entries, Spectrum | None]:
        """What the sampled entries say, without the loss scale."""
        entries = shares.Entries()
        formats = []
        for i, (parts, scaled, dtype) in enumerate(self._entries):
            numbers = values["entries", i].astype(np.float64)
            if scaled and scale:
                numbers = numbers / scale
            # under autocast the gradient of a float32 weight is computed in the lower dtype, and then cast
            form = autocast if dtype == "float32" and autocast is not None else dtype
            formats.append(form)
            entries.add(numbers, shares.weights(parts), scale or 1.0, form)
        if not self._peaks:
            return entries, None
        names = [name for chunk, _ in self._peaks for name in chunk]
        peaks = np.concatenate(
            [
                values["absmax", i].astype(np.float64) / (scale or 1.0 if scaled else 1.0)
                for i, (_, scaled) in enumerate(self._peaks)
            ]
        )
        bad = [i for i, peak in enumerate(peaks) if not np.isfinite(peak)]
        at = bad[-1] if bad else int(np.argmax(peaks))
        lowest = min(formats, key=_room) if formats else "float32"
        peak = float(peaks[at])
        return entries, Spectrum(histogram=entries.histogram, absmax=peak, largest=names[at], dtype=lowest)


def _room(dtype: str) -> float:
    form = format_of(dtype)
    return form.max if form is not None else float("inf")
