"""The record: what was found, to JSON and back."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .errors import UsageError

PHASES = ("input", "state", "forward", "backward", "optimizer")
PICTURES = ("source_context", "modules", "reached")  # of the context, what a page draws and nobody reads as text


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """One row of the table: the numbers of a tensor, None where nobody looked.

    `numel` and the counts are of the numbers that were looked at: both parts of a complex number, the stored
    values of a sparse tensor, the local shard of a distributed one. `min`, `max`, `absmax` and
    `smallest_nonzero` are over the finite ones; `below_normal` is the share of the finite nonzero numbers
    that are too small for the dtype's normal range. `exponents` is an exponent e and counts of the finite nonzero
    numbers x by floor(log2 |x|): the first of those with e, the next of those with e + 1, and so on. A ragged
    dimension of `shape` is -1.
    """

    role: str
    name: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    numel: int | None = None
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    smallest_nonzero: float | None = None
    nan: int | None = None
    pos_inf: int | None = None
    neg_inf: int | None = None
    zero: int | None = None
    subnormal: int | None = None
    below_normal: float | None = None
    headroom_bits: float | None = None
    headroom: dict[str, float | None] = field(default_factory=dict, hash=False)
    first_bad: tuple[int, ...] | None = None
    exponents: tuple[int, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        _settle(self)

    def to_dict(self) -> dict[str, Any]:
        return _written(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorStats:
        return cls(**_known(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One row of the trail: a call of a module and how large its numbers were on the way in and out."""

    module: str | None
    module_type: str | None = None
    call: int | None = None
    phase: str | None = None
    absmax_in: float | None = None
    absmax_out: float | None = None

    def __post_init__(self) -> None:
        _settle(self)

    def to_dict(self) -> dict[str, Any]:
        return _written(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Call:
        return cls(**_known(cls, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Where the first NaN or Inf of a step was made, and why; `print` it, or keep it as JSON."""

    format: ClassVar[int] = 1

    phase: str
    step: int | None = None
    call: int | None = None
    rank: int | None = None
    module: str | None = None
    module_type: str | None = None
    op: str | None = None
    line: str | None = None
    source: str | None = None
    kind: str | None = None
    tensor: str | None = None
    cause: str | None = None
    why: str | None = None
    advice: tuple[str, ...] = ()
    tensors: tuple[TensorStats, ...] = ()
    trail: tuple[Call, ...] = ()
    context: dict[str, Any] = field(default_factory=dict, hash=False)
    handled: str | None = None

    def __post_init__(self) -> None:
        _settle(self)

    def title(self) -> str:
        """The verdict in one sentence, on one line."""
        from .report.text import title

        return title(self)

    def to_dict(self) -> dict[str, Any]:
        """Every field in terms of JSON; non-finite numbers are the strings "nan", "inf" and "-inf"."""
        return {"format": self.format, **_written(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_dict` wrote; keys it does not know are left alone."""
        if not isinstance(data, Mapping) or "format" not in data:
            raise UsageError("not a nanhunt finding: expected an object with the key 'format'")
        if data["format"] != cls.format:
            raise UsageError(
                f"this finding has format {data['format']!r}, and this nanhunt reads format {cls.format}: "
                "show it with the version that wrote it, or upgrade nanhunt"
            )
        return cls(**_known(cls, data))

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Finding:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UsageError(f"not a nanhunt finding: not JSON ({error})") from error
        return cls.from_dict(data)

    def scalars(self) -> dict[str, float]:
        """The numbers of this finding, flat, for any logger of scalars: `writer.add_scalar(key, value, finding.step)`.

        Keys are `nanhunt/step`, `nanhunt/call` and `nanhunt/rank`; `nanhunt/handled`, 1 for what is no fault;
        `nanhunt/<role>.<number>` for each row of `tensors`, such as `nanhunt/input.absmax` or
        `nanhunt/output.headroom.bfloat16` (bits), the second row of a role being `input2`; and what of the context
        is a number, such as `nanhunt/lr`. A number that nobody knows, a NaN or an infinity has no key.
        """
        named: dict[str, Any] = {name: getattr(self, name) for name in ("step", "call", "rank")}
        named["handled"] = self.handled is not None
        seen: dict[str, int] = {}
        for row in self.tensors:
            nth = seen[row.role] = seen.get(row.role, 0) + 1
            named[row.role if nth == 1 else f"{row.role}{nth}"] = {
                spec.name: getattr(row, spec.name) for spec in fields(row) if spec.name not in _NO_SCALARS
            }
        context = {key: value for key, value in self.context.items() if key not in PICTURES}
        # What the finding says of itself comes last: it stands where a name of the context is the same.
        return dict(_scalars("nanhunt/", context)) | dict(_scalars("nanhunt/", named))

    def __str__(self) -> str:
        from .report.text import page

        return page(self, color=False)

    def _repr_html_(self) -> str:
        from .report.html import notebook

        return notebook(self)


# -- between records and JSON: the annotation of a field is its schema --------------------------------------

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _text(value: Any) -> str:
    if value is None:
        raise TypeError
    return str(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        return _NON_FINITE[value]
    if isinstance(value, bool):
        raise TypeError
    # One NaN object for all: containers compare by identity first, so a record equals its copy from JSON.
    number = float(value)
    return math.nan if number != number else number


def _wholes(value: Any) -> tuple[int, ...]:
    return tuple(_whole(item) for item in value)


def _histogram(value: Any) -> tuple[int, tuple[int, ...]]:
    first, counts = value
    return _whole(first), _wholes(counts)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, Mapping)):
        raise TypeError
    return tuple(str(item) for item in value)


def _numbers(value: Any) -> dict[str, float | None]:
    return {str(key): None if item is None else _number(item) for key, item in value.items()}


def _rows(value: Any, row: type[TensorStats] | type[Call]) -> tuple[Any, ...]:
    return tuple(item if isinstance(item, row) else row.from_dict(item) for item in value)


def _plain(value: Any, depth: int = 0) -> Any:
    """Free-form context in JSON's terms; what JSON cannot say becomes its text."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value)
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < 8 and isinstance(value, (list, tuple)):
        return tuple(_plain(item, depth + 1) for item in value)
    return str(value)


def _context(value: Any) -> dict[str, Any]:
    return {str(key): _plain(item) for key, item in value.items()}


_NO_SCALARS = ("shape", "first_bad", "exponents")  # lists of a row, which no curve can be drawn of


def _scalars(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            value = {str(at): item for at, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _scalars(f"{prefix}{key}.", value)
        elif isinstance(value, (int, float)):
            try:
                number = float(value)
            except OverflowError:  # a whole number beyond float64
                continue
            if math.isfinite(number):
                yield f"{prefix}{key}", number


_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "str": (_text, "a text"),
    "int": (_whole, "a whole number"),
    "float": (_number, "a number"),
    "tuple[int, ...]": (_wholes, "a list of whole numbers"),
    "tuple[int, tuple[int, ...]]": (_histogram, "an exponent and a list of counts"),
    "tuple[str, ...]": (_texts, "a list of texts"),
    "dict[str, float | None]": (_numbers, "an object of numbers"),
    "dict[str, Any]": (_context, "an object"),
    "tuple[TensorStats, ...]": (lambda value: _rows(value, TensorStats), "a list of tensors"),
    "tuple[Call, ...]": (lambda value: _rows(value, Call), "a list of calls"),
}


def _settle(record: TensorStats | Call | Finding) -> None:
    """Brings every field into the one form that survives JSON, whoever filled it in."""
    for spec in fields(record):
        value = getattr(record, spec.name)
        schema = str(spec.type)
        kind = schema.removesuffix(" | None")
        if value is None and kind != schema:
            continue
        read, expected = _READERS[kind]
        try:
            settled = read(value)
        except UsageError:
            raise
        except Exception:
            shown = str(value)[:80]
            what = f"{type(record).__name__}: {spec.name!r} should be {expected}, got {shown}"
            raise UsageError(f"not a nanhunt {what}") from None
        object.__setattr__(record, spec.name, settled)


def _known(cls: type[TensorStats] | type[Call] | type[Finding], data: Mapping[str, Any]) -> dict[str, Any]:
    names = [spec.name for spec in fields(cls)]
    known = {name: data[name] for name in names if name in data}
    if names[0] not in known:
        raise UsageError(f"not a nanhunt {cls.__name__}: the key {names[0]!r} is missing")
    return known


def _written(record: TensorStats | Call | Finding) -> dict[str, Any]:
    written = {spec.name: getattr(record, spec.name) for spec in fields(record)}
    return {name: _jsonable(value) for name, value in written.items()}


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, (TensorStats, Call)):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return value
