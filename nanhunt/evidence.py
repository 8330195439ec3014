"""What is known about a birth, in plain numbers: the rules of `causes` judge by this alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from .finding import TensorStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A scalar that its dtype could not hold: an eps that became 0, a 1 - eps that became 1."""

    op: str
    value: float
    dtype: str
    becomes: float
    beside: float | None = None  # what it was added to, when that swallowed it
    site: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The reduced slice in which the first bad number was made."""

    length: int
    all_neg_inf: int = 0  # how many rows hold nothing but -inf
    pos_inf: int = 0  # how many rows hold a +inf
    rows: int = 1
    first: tuple[int, ...] | None = None  # which row holds nothing but -inf
    dims: tuple[int, ...] = ()  # over which it is reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules of `causes` judge by. `at` holds the operands' numbers behind the first bad number."""

    op: str
    phase: str
    kinds: tuple[str, ...]
    forward: str | None = None
    dtype: str | None = None
    tensors: tuple[TensorStats, ...] = ()
    bad: int | None = None
    of: int | None = None
    where: tuple[int, ...] | None = None
    at: dict[str, float] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    exact: float | None = None
    magnitude: float | None = None  # largest finite result that float64 gives for the numbers that turned out bad
    inherited: bool = False  # an operand was bad already
    whole: tuple[str, ...] = ()  # operands that hold nothing but whole numbers, as counts do
    lost: Lost | None = None
    row: Row | None = None
    autocast: str | None = None  # the dtype that autocast chose
    given: str | None = None  # the dtype before autocast chose another; None when an op before this one had it already
    loss_scale: float | None = None
    scaling: bool = False  # the loss was being multiplied by the loss scale
    absorbed_by: tuple[str, ...] = ()  # ops that threw the bad forward output of the same op away
    zero_from: str | None = None  # the op that made the operand which is zero
    count: int | None = None  # numbers that a reduction was over
    user_code: bool = False  # in backward: the user's own function or hook
