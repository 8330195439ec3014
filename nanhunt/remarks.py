"""What an audit says: a remark for each thing that is wrong before the first step; their list prints as a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

FAULT, RISK = "fault", "risk"
OUTSIDE = "code outside the model"

Line = tuple[str | None, str | None]  # "file.py:88", and the text of that line

# Every rule, and what it is about. docs and --ignore know them by these words.
RULES = {
    "eps_zero": "an eps of zero, or below, where something is divided by what it guards",
    "eps_lost": "an eps that its format rounds away",
    "eps_subnormal": "an eps below the smallest normal number of its format, and something is divided by it",
    "mask_overflow": "a constant that its format cannot hold, or that becomes infinite in it",
    "mask_sum": "the lowest number of a format, as a mask, with something added that makes it -inf",
    "cast_overflow": "a cast that turns finite numbers into infinities",
    "nonfinite": "a NaN or an Inf in a parameter, a buffer or the optimizer's state",
    "uninitialised": "numbers that look like memory nobody has written to",
    "large": "numbers no initialisation and no healthy training gives",
    "weight_overflow": "a weight that is infinite in the dtype autocast casts it to",
    "weight_underflow": "weights that are zero in the dtype autocast casts them to",
    "half_weights": "float16 or bfloat16 weights that are updated without a float32 copy",
    "lost_updates": "updates smaller than half a step of the format that the weights are kept in",
    "warmup": "a warm-up whose first part is too small to change a weight",
    "weight_decay": "a weight decay that does nothing in this format, or far too much at this learning rate",
    "optimizer_state": "moments in a format that cannot hold them, or that the update refuses",
    "optimizer_eps": "an eps of the optimizer that is zero in the format of its update",
    "optimizer_number": "a learning rate, eps or weight decay that is not a usable number",
    "unfused_half": "an update in half precision that is rounded after each of its operations",
    "runs_in_half": "a softmax, norm or loss that runs in half precision",
    "upcast_undone": "a cast to float32 that autocast takes back at once",
    "autocast_rule": "a custom operation or autograd.Function without a rule for autocast",
    "half_sum": "a long sum that is kept in half precision while it grows",
    "one_sample": "a mean and variance taken over a single number",
    "scaler_unneeded": "a GradScaler where no gradient is float16",
    "scaler_half_weights": "a GradScaler over float16 weights, whose gradients it refuses",
    "scaled_loss": "a loss in float16 that the loss scale makes infinite",
    "clip_before_unscale": "gradients that are clipped while they still carry the loss scale",
    "step_before_unscale": "an optimizer step on gradients that still carry the loss scale",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing that is wrong, or will go wrong.

    Attributes:
        place: the path of a module as in `named_modules()` ("" for the model's own forward), the name of a parameter
            or buffer, "optimizer", "optimizer.param_groups[1]", "scaler", or "code outside the model".
        rule: one of `RULES`.
        severity: "fault" for what is wrong as it stands, "risk" for what some data will bring out.
        message: what is wrong, with the dtype and the numbers.
        fix: what to do.
        line, source: `"file.py:88"` and its text, for what was seen while the example or the step ran.
        names: the parameters it is about, where these are several; the worst first.
    """

    place: str
    rule: str
    severity: str
    message: str
    fix: str
    line: str | None = None
    source: str | None = None
    names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {**dataclasses.asdict(self), "names": list(self.names)}

    def __str__(self) -> str:
        from .report.remarks import entry

        return "\n".join(entry([self], 100))


class Remarks(list[Remark]):
    """The remarks of one audit, faults first; empty when nothing is wrong. `print` shows them as a page.

    Attributes:
        looked: what was looked at, in words.
        unseen: what was not looked at, and why.
    """

    def __init__(self, remarks: Iterable[Remark] = (), *, looked: Iterable[str] = (), unseen: Iterable[str] = ()):
        super().__init__(sorted(remarks, key=lambda remark: remark.severity != FAULT))
        self.looked, self.unseen = tuple(looked), tuple(unseen)

    def of(self, rule: str) -> list[Remark]:
        """The remarks of one rule.

        Raises:
            UsageError: when there is no such rule.
        """
        return [remark for remark in self if remark.rule in known((rule,))]

    def to_dict(self) -> dict[str, Any]:
        """The whole audit as JSON has it."""
        return {
            "format": 1,
            "remarks": [remark.to_dict() for remark in self],
            "looked": list(self.looked),
            "unseen": list(self.unseen),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        from .report.remarks import page

        return page(self)

    def _repr_html_(self) -> str:
        from .report.remarks import notebook

        return notebook(self)


def known(rules: Iterable[str]) -> tuple[str, ...]:
    """The same names of rules.

    Raises:
        UsageError: when one of them is no rule, with all that are.
    """
    rules = (rules,) if isinstance(rules, str) else tuple(rules)
    for rule in rules:
        if rule not in RULES:
            raise UsageError(f"there is no rule {rule!r}: the rules are {', '.join(RULES)}")
    return rules


class Sheet:
    """Takes remarks as they come: each once for a place and a line."""

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self._ignore = frozenset(known(ignore))
        self._remarks: dict[tuple[str, str, str | None], Remark] = {}
        self.unseen: list[str] = []

    def add(
        self,
        rule: str,
        place: str,
        message: str,
        fix: str,
        *,
        severity: str = FAULT,
        at: Line = (None, None),
        names: Iterable[str] = (),
    ) -> None:
        line, source = at
        if rule in self._ignore or (line is None and self.has(rule, place)):
            return
        made = Remark(
            place=place,
            rule=rule,
            severity=severity,
            message=message,
            fix=fix,
            line=line,
            source=source,
            names=tuple(names),
        )
        self._remarks.setdefault((rule, place, line), made)

    def has(self, rule: str, place: str) -> bool:
        return any(key[:2] == (rule, place) for key in self._remarks)

    def explains(self) -> bool:
        """Whether a remark may tell why the program died: a fault, or a backward in other dtypes than its forward."""
        return any(r.severity == FAULT or r.rule == "autocast_rule" for r in self._remarks.values())

    def remarks(self, looked: Iterable[str]) -> Remarks:
        return Remarks(self._remarks.values(), looked=looked, unseen=dict.fromkeys(self.unseen))


def common(names: Iterable[str]) -> str:
    """The path that dotted names share: "layer" of "layer.0.scale" and "layer.1.scale"; a single name is its own."""
    paths = [name.split(".") for name in dict.fromkeys(names)]
    if len(paths) < 2:
        return ".".join(paths[0]) if paths else ""
    shared = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
