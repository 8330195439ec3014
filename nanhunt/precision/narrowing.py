"""Whether a run can move to a narrower format: which modules stand in the way, and which must stay in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..numerics import Format, fmt
from ..ranges import path_of
from .forecast import Forecast
from .profiles import GRADIENTS, ModuleProfile, Numbers, Profile
from .spectra import NOTHING, Share, overflows, scaled, target

_SPARE = 2.0  # bits that a loss scale leaves to the largest gradient
_LARGEST_SCALE = 24  # as a power of two: GradScaler's own first guess is 2^16
_LOST_WEIGHTS, _LOST_GRADIENTS = 0.1, 0.5  # shares of the numbers that are not zero, from which on it is a reason
_WORDS = {
    "inputs": "the batch holds",
    "outputs": "its outputs reach",
    "output_gradients": "gradients of its outputs reach",
    "weights": "its weights reach",
    "weight_gradients": "gradients of its weights reach",
}
NAMES = {
    "inputs": "inputs",
    "outputs": "outputs",
    "output_gradients": "output gradients",
    "weights": "weights",
    "weight_gradients": "weight gradients",
}
_KINDS = {
    "inputs": "of the batch",
    "outputs": "of its outputs",
    "output_gradients": "of the gradients of its outputs",
    "weights": "of its weights",
    "weight_gradients": "of the gradients of its weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a module cannot move.

    Attributes:
        kind: `"overflow"`, `"vanish"` (too much of it would), or `"not finite"` (it is so already).
        makes: False when what was handed to it, or what a module inside it gave, is too large already.
        left: bits of headroom, negative for an overflow, -inf for what is not finite already.
        share: how much of its numbers it concerns.
    """

    module: str
    type: str
    role: str
    kind: str
    makes: bool
    absmax: float | None
    left: float
    share: Share
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A role of a module whose headroom shrinks at a clear rate."""

    module: str
    type: str
    role: str
    forecast: Forecast
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A role of a module, and the bits of headroom that it has in a format."""

    module: str
    type: str
    role: str
    absmax: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run can move to `dtype` with `loss_scale`; `reasons` against it, the worst first.

    Attributes:
        keep: paths of the modules to keep in float32.
        closest: of each module the role with the least headroom, the closest first; gradients as they are, unless
            a loss scale was asked for.
        warnings: what will overflow soon, the soonest first.
        counted: whether there were numbers at all; without, nothing fits.
    """

    dtype: str
    loss_scale: float
    reasons: tuple[Reason, ...]
    keep: tuple[str, ...]
    closest: tuple[Close, ...]
    warnings: tuple[Warned, ...]
    counted: bool = True

    @property
    def fits(self) -> bool:
        return self.counted and not self.reasons

    def __bool__(self) -> bool:
        return self.fits

    def title(self) -> str:
        """The answer in one sentence, with the worst of the reasons."""
        scale = f" with a loss scale of {fmt(self.loss_scale)}" if self.loss_scale != 1 else ""
        if not self.counted:
            return f"no number was counted, so whether this run can move to {self.dtype} is not known"
        if not self.reasons:
            near = self.closest[0] if self.closest else None
            if near is None:
                return f"this run can move to {self.dtype}{scale}"
            what = f"the {NAMES[near.role]} of {path_of(near.module)} ({near.type})"
            held = f"closest to the limit are {what}, with {near.left:+.1f} bits of headroom"
            return f"this run can move to {self.dtype}{scale}: yes; {held}"
        more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
        return f"this run can move to {self.dtype}{scale}: no, because {self.reasons[0].text}{more}"

    def __str__(self) -> str:
        return self.title()


def verdict(profile: Profile, dtype: object = "float16", loss_scale: float | None = None) -> Verdict:
    """See `Profile.verdict`."""
    form = target(dtype)
    free = loss_scale is None  # gradients then come as close to the limit as the scale brings them
    if loss_scale is None:
        loss_scale = best_scale(profile, form.name)
    scaled(loss_scale)  # refused here, also where there is no gradient to scale
    over, lost = [], []
    unknown: list[tuple[ModuleProfile, str]] = []
    beyond = {
        name
        for name, one in profile.modules.items()
        if one.outputs is not None and (_broken(one.outputs) or _over(one.outputs, form, 1.0) is not None)
    }
    calibrates = any(scale is not None for scale in profile.loss_scales)
    close: list[Close] = []
    warned: list[Warned] = []
    for one in profile.modules.values():
        near: list[Close] = []
        for role, numbers in _held(one):
            scale = loss_scale if role in GRADIENTS else 1.0
            if numbers.absmax:
                left = numbers.headroom(form.name, 1.0 if free else scale)
                assert left is not None  # the format is known
                near.append(Close(module=one.name, type=one.type, role=role, absmax=numbers.absmax, left=left))
            skips = calibrates and role in GRADIENTS  # what is not finite at some scale, a GradScaler skips
            if _broken(numbers) and skips and not numbers.histogram.finite:
                unknown.append((one, role))
                continue
            if _broken(numbers) and not skips:
                over.append(_not_finite(one, role, numbers, form, role != "outputs" or _makes(one, beyond, form)))
                continue
            share = _over(numbers, form, scale)
            if share is not None:
                makes = role != "outputs" or _makes(one, beyond, form)
                over.append(_overflow(one, role, numbers, form, scale, share, makes))
                continue
            reason = _vanished(one, role, numbers, form, scale)
            if reason is not None:
                lost.append(reason)
            soon = numbers.forecast(profile.steps, form.name, 1.0 if free else scale)
            if soon is not None:
                warned.append(_warning(one, role, soon, form))
        if near:
            close.append(min(near, key=lambda c: c.left))
    # Gradients that overflow are mostly what a forward that does has made.
    over.sort(key=lambda reason: (not reason.makes, reason.role in GRADIENTS, reason.left))
    lost.sort(key=lambda reason: -reason.share.lost / max(reason.share.finite, 1))
    reasons = (*over, *lost, *([_unknown(profile, unknown)] if unknown else ()))
    return Verdict(
        dtype=form.name,
        loss_scale=loss_scale,
        reasons=reasons,
        keep=tuple(dict.fromkeys(reason.module for reason in reasons if reason.makes)),
        closest=tuple(sorted(close, key=lambda c: c.left)),
        warnings=tuple(sorted(warned, key=lambda one: one.forecast.steps)),
        counted=any(numbers.histogram.numel for one in profile.modules.values() for _, numbers in one.roles()),
    )


def best_scale(profile: Profile, dtype: object) -> float:
    """The largest power of two that leaves every gradient two bits of headroom, 1 to 2^24; 1 without gradients.

    Formats with the exponents of float32 need none: theirs is 1.
    """
    form = target(dtype)
    if form.smallest_normal < 1e-30:
        return 1.0
    rooms = [
        room
        for one in profile.modules.values()
        for role, numbers in one.roles()
        if role in GRADIENTS and numbers.absmax and (room := numbers.headroom(form.name)) is not None
    ]
    if not rooms:
        return 1.0
    return 2.0 ** min(max(math.floor(min(rooms) - _SPARE), 0), _LARGEST_SCALE)


def _held(one: ModuleProfile) -> Iterator[tuple[str, Numbers]]:
    """The roles that a module answers for: what is handed to it is the output of another, but for the batch."""
    for role, numbers in one.roles():
        if (role == "inputs" and one.name) or (role in ("outputs", "output_gradients") and not one.own):
            continue
        yield role, numbers


def _over(numbers: Numbers, form: Format, scale: float) -> Share | None:
    """The share that overflows, None when nothing does. What a sample has missed, the largest number tells."""
    share = numbers.share(form.name, scale)
    if share.over:
        return share
    largest = None if numbers.absmax is None else numbers.absmax * scale
    return share if largest is not None and overflows(largest, form) else None


def _broken(numbers: Numbers) -> int:
    """How many are NaN or +Inf already; a -Inf is mostly a mask."""
    return numbers.histogram.nan + numbers.histogram.pos_inf


def _makes(one: ModuleProfile, beyond: set[str], form: Format) -> bool:
    """Whether an overflow of its outputs is its own: neither handed to it nor given by a module inside it."""
    if one.inputs is not None and (_broken(one.inputs) or _over(one.inputs, form, 1.0) is not None):
        return False
    inside = f"{one.name}." if one.name else ""
    return not any(name != one.name and name.startswith(inside) for name in beyond)


def _overflow(
    one: ModuleProfile, role: str, numbers: Numbers, form: Format, scale: float, share: Share, makes: bool
) -> Reason:
    left = numbers.headroom(form.name, scale)
    assert left is not None and numbers.absmax is not None
    size = fmt(numbers.absmax * scale)
    held = f"{_WORDS[role]} {size}{_at(scale)}, and {form.name} ends at {fmt(form.max)}"
    carried = "" if makes else ", which it was handed"
    return Reason(
        module=one.name,
        type=one.type,
        role=role,
        kind="overflow",
        makes=makes,
        absmax=numbers.absmax,
        left=left,
        share=share,
        text=f"{path_of(one.name)} ({one.type}): {held}{carried}",
    )


def _not_finite(one: ModuleProfile, role: str, numbers: Numbers, form: Format, makes: bool) -> Reason:
    count, carried = _broken(numbers), "" if makes else ", which it was handed"
    held = f"{fmt(count)} {_KINDS[role]} {'are' if count > 1 else 'is'} NaN or Inf already, in {_joined(numbers)}"
    return Reason(
        module=one.name,
        type=one.type,
        role=role,
        kind="not finite",
        makes=makes,
        absmax=numbers.absmax,
        left=-math.inf,
        share=numbers.share(form.name),
        text=f"{path_of(one.name)} ({one.type}): {held}{carried}",
    )


def _unknown(profile: Profile, unknown: list[tuple[ModuleProfile, str]]) -> Reason:
    """Gradients of which there is nothing but what a GradScaler has skipped: one reason for all of them."""
    one, role = unknown[0]
    names = list(dict.fromkeys(path_of(module.name) for module, _ in unknown))
    scales = [scale for scale in profile.loss_scales if scale is not None]
    span = fmt(scales[0]) if scales[0] == scales[-1] else f"{fmt(scales[0])} to {fmt(scales[-1])}"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Reason(
        module=one.name,
        type=one.type,
        role=role,
        kind="not finite",
        makes=False,
        absmax=None,
        left=-math.inf,
        share=NOTHING,
        text=f"all gradients of {names[0]}{more} are NaN or Inf at the loss scale of these steps, {span}: what they "
        "are is not known; run more steps, until the GradScaler has found its scale",
    )


def _joined(numbers: Numbers) -> str:
    return " and ".join(numbers.dtypes)


def _vanished(one: ModuleProfile, role: str, numbers: Numbers, form: Format, scale: float) -> Reason | None:
    """Small outputs that vanish are mostly harmless; weights and gradients that do are not."""
    most = {"weights": _LOST_WEIGHTS, "output_gradients": _LOST_GRADIENTS, "weight_gradients": _LOST_GRADIENTS}
    if role not in most or form.smallest_normal < 1e-30:
        return None
    share, nonzero = numbers.share(form.name, scale), numbers.histogram.nonzero
    if not nonzero or share.lost / nonzero < most[role]:
        return None
    part = f"{100 * share.lost / nonzero:.3g}% {_KINDS[role]} vanish{_at(scale)}"
    return Reason(
        module=one.name,
        type=one.type,
        role=role,
        kind="vanish",
        makes=True,
        absmax=numbers.absmax,
        left=numbers.headroom(form.name, scale) or 0.0,
        share=share,
        text=f"{path_of(one.name)} ({one.type}): {part} in {form.name}",
    )


def _at(scale: float) -> str:
    return f" at a loss scale of {fmt(scale)}" if scale != 1 else ""


def _warning(one: ModuleProfile, role: str, soon: Forecast, form: Format) -> Warned:
    said = (
        f"{path_of(one.name)} ({one.type}): the headroom {_KINDS[role]} in {form.name}, {soon.left:.1f} bits now, "
        f"shrinks by {soon.rate:.2g} bits a step: an overflow in about {soon.steps} step{'s' * (soon.steps != 1)}"
    )
    return Warned(module=one.name, type=one.type, role=role, forecast=soon, text=said)
