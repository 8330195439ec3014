"""Shares: what a histogram says would overflow, turn subnormal or vanish, against casting every number."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.numerics import FORMATS
from nanhunt.precision.exponents import SIZE, count, histogram, stride
from nanhunt.precision.forecast import forecast
from nanhunt.precision.spectra import CLASSES, TARGETS, Histogram, class_of, overflows, scaled
from nanhunt.probe import payload

_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_SOURCES = [*_BITS, torch.float8_e4m3fn, torch.float8_e5m2]


def counted(t: torch.Tensor, sample: int | None = None) -> Histogram:
    numbers = payload(t)
    assert numbers is not None
    return histogram(count(numbers, sample)[0])


def cast(t: torch.Tensor, name: str, scale: float) -> tuple[int, int, int, int]:
    """Overflow, subnormal, vanished and finite numbers, by casting each."""
    form, numbers = FORMATS[name], t if t.dtype is torch.float64 else t.to(torch.float32)
    finite = numbers[numbers.isfinite()]
    scaled_up = (finite * scale).to(torch.float32)  # the way by which torch casts a float64 to less
    result = scaled_up.to(getattr(torch, name)).to(torch.float64).abs()
    over = ~result.isfinite()
    if name == "float8_e4m3fn":  # saturates, or gives NaN: beyond the last number by more than half a step
        over |= scaled_up.to(torch.float64).abs() > form.max + 2.0 ** (8 - 3) / 2
    tiny = ~over & (result > 0) & (result < form.smallest_normal)
    lost = (result == 0) & (finite != 0)
    return int(over.sum()), int(tiny.sum()), int(lost.sum()), finite.numel()


def told(held: Histogram, name: str, scale: float) -> tuple[int, int, int, int]:
    share = held.share(name, scale)
    return share.over, share.tiny, share.lost, share.finite


def borders(dtype: torch.dtype) -> torch.Tensor:
    """Numbers on, just below and just above each border of each format and each mantissa that matters, both signs."""
    at = [2.0**k for k in range(-160, 129)]
    for form in FORMATS.values():
        at += [form.max, form.smallest_normal, form.smallest_subnormal, form.max * (1 + form.eps / 4)]
        at += [1.5 * form.smallest_subnormal, form.smallest_normal - form.smallest_subnormal / 2]
    at += [65519.0, 65520.0, 464.0, 465.0, 61439.0, 61440.0, 3.3895e38]
    base = torch.tensor([x for x in at if math.isfinite(x)], dtype=torch.float64)
    every = [base, *(base * (2 - 2.0**-ones) for ones in range(1, 26)), base * 1.8125]
    there = torch.cat(every).to(dtype)
    ints = there.view(_BITS[dtype])
    around = torch.cat([there, (ints + 1).view(dtype), (ints - 1).view(dtype)])
    return torch.cat([around, -around])


def any_bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    info = torch.iinfo(_BITS[dtype])
    made = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max, (n,), dtype=_BITS[dtype], generator=made).view(dtype)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", _BITS, ids=str)
def test_a_share_is_what_casting_gives_on_any_bits_and_on_every_border(dtype: torch.dtype, name: str) -> None:
    t = torch.cat([any_bits(dtype, 50_000, 1), borders(dtype)])
    held = counted(t)
    assert held.share(name).exact
    assert told(held, name, 1.0) == cast(t, name, 1.0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("power", [-10, -1, 1, 3, 16, 24])
def test_a_share_under_a_scale_of_a_power_of_two_is_what_casting_the_product_gives(name: str, power: int) -> None:
    t = torch.cat([any_bits(torch.float32, 50_000, 2), borders(torch.float32)])
    held = counted(t)
    if held.share(name, 2.0**power).exact:
        assert told(held, name, 2.0**power) == cast(t, name, 2.0**power)
    else:  # products that are subnormal in float32, in a format that shows them
        assert power < 0 and FORMATS[name].smallest_normal < 1e-30


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_a_small_format_is_counted_right(dtype: torch.dtype, name: str) -> None:
    size = torch.finfo(dtype).bits
    whole = torch.arange(2**size, dtype=torch.int32).to(torch.uint8 if size == 8 else torch.int16).view(dtype)
    for power in (0, 5, 17):
        assert told(counted(whole), name, 2.0**power) == cast(whole, name, 2.0**power)


_sizes = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 65504.0, 65519.996, 65520.0, 448.0, 464.0, 2.0**-24, 2.0**-25, 2.0**-14, 1e-45]),
    st.integers(-149, 127).map(lambda power: 2.0**power),
)


@settings(max_examples=150, deadline=None)
@given(numbers=st.lists(_sizes, min_size=1, max_size=24), name=st.sampled_from(list(TARGETS)), power=st.integers(0, 24))
def test_a_share_is_exact_for_whatever_numbers_there_are(numbers: list[float], name: str, power: int) -> None:
    t = torch.tensor(numbers, dtype=torch.float32)
    held = counted(t)
    assert told(held, name, 2.0**power) == cast(t, name, 2.0**power)
    assert held.nan == int(t.isnan().sum()) and held.zero == int((t == 0).sum())
    assert (held.pos_inf, held.neg_inf) == (int((t == math.inf).sum()), int((t == -math.inf).sum()))
    assert held.numel == len(numbers)


def test_the_brute_force_of_these_tests_can_fail() -> None:
    """Guards the tests above: a histogram by exponent alone would not do."""
    t = torch.tensor([65504.0, 65519.0, 65520.0])
    assert cast(t, "float16", 1.0)[0] == 1
    assert int((t.frexp().exponent > 15).sum()) == 3


def test_float64_beyond_float32_is_counted_apart_and_a_scale_is_then_no_longer_exact() -> None:
    t = torch.tensor([1e300, -1e300, 1e-300, 1e-46, 1.0, 0.0], dtype=torch.float64)
    held = counted(t)
    assert (held.beyond, held.below, held.zero) == (2, 2, 1)
    assert told(held, "float16", 1.0) == (2, 0, 2, 6) and held.share("float16").exact
    assert not held.share("float16", 2.0).exact


def test_float64_is_rounded_to_float32_first_as_torch_does() -> None:
    t = torch.tensor([65520 - 1e-9], dtype=torch.float64)
    assert t.to(torch.float16).isinf().all()
    assert counted(t).share("float16").over == 1


@pytest.mark.parametrize("scale", [3.0, 1000.0, 0.3])
def test_a_scale_that_is_no_power_of_two_gives_bounds_and_says_so(scale: float) -> None:
    t = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).exp().pow(4) * 1e-3
    share, (over, tiny, lost, _) = counted(t).share("float16", scale), cast(t, "float16", scale)
    assert not share.exact
    assert share.over >= over and share.tiny + share.lost >= tiny + lost


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "2"])
def test_what_is_no_scale_is_refused(scale: object) -> None:
    with pytest.raises(UsageError, match="loss_scale"):
        scaled(scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int8", "float64", "float8_e8m0fnu", torch.int32])
def test_what_is_no_format_to_move_to_is_refused(dtype: object) -> None:
    with pytest.raises(UsageError, match="a share can be had of float32, bfloat16, float16"):
        Histogram().share(dtype)


def test_a_dtype_of_torch_does_as_well_as_its_name() -> None:
    held = counted(torch.tensor([1e5]))
    assert held.share(torch.float16) == held.share("float16") == held.share("torch.float16") == held.share("half")


@pytest.mark.parametrize("name", TARGETS)
def test_one_number_overflows_where_its_cast_does(name: str) -> None:
    for size in (FORMATS[name].max, FORMATS[name].max * (1 + 0.6 * FORMATS[name].eps), 1.0, math.inf):
        t = torch.tensor([size], dtype=torch.float64).to(torch.float32)
        assert overflows(float(t), FORMATS[name]) == (cast(t, name, 1.0)[0] == 1 or float(t) == math.inf)


@pytest.mark.parametrize("dtype", _SOURCES, ids=str)
def test_the_largest_number_is_that_of_all_finite_ones(dtype: torch.dtype) -> None:
    t = torch.tensor([1.5, -3.0, math.inf, -math.inf, math.nan, 0.0]).to(dtype)
    numbers = payload(t)
    assert numbers is not None
    finite = t.to(torch.float32)
    assert float(count(numbers)[1]) == finite[finite.isfinite()].abs().max()


def test_odd_layouts_count_each_number_as_often_as_it_stands_there() -> None:
    t = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(3))
    whole = counted(t)
    assert counted(t.permute(2, 0, 1)) == whole == counted(t.transpose(0, 2).contiguous())
    assert counted(t[::2, :, ::3]) == counted(t[::2, :, ::3].contiguous())
    assert counted(t[:1].expand(5, 8, 10)) == counted(t[:1].repeat(5, 1, 1))
    assert counted(torch.complex(t, -t)) == counted(torch.stack([t, -t]))
    assert counted(torch._neg_view(t)) == whole
    sparse = t.relu().to_sparse()
    assert counted(sparse) == counted(sparse.coalesce().values())
    assert counted(torch.tensor(3.0)).numel == 1


def test_a_large_tensor_is_counted_in_pieces_to_the_same_end() -> None:
    t = torch.randn(300_001, generator=torch.Generator().manual_seed(4))
    parts = [counted(part) for part in t.split(90_000)]
    assert counted(t) == parts[0] + parts[1] + parts[2] + parts[3]


def test_a_sample_is_spread_over_rows_and_columns_and_the_largest_number_is_that_of_all() -> None:
    t = torch.ones(256, 64)
    t[:, 5] = 1000.0  # a column that a stride of 64 would always take, or never
    t[17, 3] = 1e6
    numbers = payload(t)
    assert numbers is not None
    counts, peak = count(numbers, 1024)
    held = histogram(counts)
    assert float(peak) == 1e6 and held.numel <= 1024
    assert 0.5 / 64 < held.exponents()[9] / held.numel < 2 / 64
    assert math.gcd(stride(256 * 64, 1024), 256 * 64) == 1


def test_counting_changes_nothing_and_keeps_to_the_device_of_the_tensor() -> None:
    t = torch.randn(100, requires_grad=True)
    before = t.detach().clone()
    counts, peak = count(t)
    assert torch.equal(t.detach(), before) and t.grad is None and not counts.requires_grad and not peak.requires_grad
    assert counts.shape == (SIZE,) and counts.dtype is torch.int64


def test_a_histogram_comes_back_from_json_and_pickle() -> None:
    held = counted(torch.cat([any_bits(torch.float32, 1000, 5), torch.zeros(3)]))
    assert Histogram.from_dict(held.to_dict()) == held == pickle.loads(pickle.dumps(held))
    assert Histogram.from_dict({}) == Histogram()


def test_the_classes_of_mantissas_rise_with_the_fraction() -> None:
    fractions = [Fraction(n, 2**12) for n in range(2**12)]
    classes = [class_of(one) for one in fractions]
    assert classes == sorted(classes) and classes[0] == 0 and classes[1] == 1
    assert class_of(1 - Fraction(1, 2**23)) == CLASSES - 1


# --- the trend -------------------------------------------------------------------------------------------------


def test_headroom_that_shrinks_steadily_is_foretold() -> None:
    steps = list(range(10))
    found = forecast(steps, [8.0 - 0.5 * step for step in steps])
    assert found is not None and found.rate == pytest.approx(0.5) and found.left == pytest.approx(3.5)
    assert found.steps == 7


def test_one_odd_step_does_not_move_a_trend() -> None:
    rooms = [8.0 - 0.5 * step for step in range(12)]
    rooms[5] = 30.0
    found = forecast(range(12), rooms)
    assert found is not None and found.rate == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("rooms", [[5.0] * 12, [5.0 + 0.1 * k for k in range(12)], [9.0, 8.0, 7.0, 6.0], []])
def test_no_trend_a_growing_headroom_and_too_few_steps_foretell_nothing(rooms: list[float]) -> None:
    assert forecast(range(len(rooms)), rooms) is None


def test_an_end_that_is_far_away_is_not_foretold() -> None:
    assert forecast(range(10), [30.0 - 0.01 * step for step in range(10)]) is None


def test_noise_is_hardly_ever_taken_for_a_trend() -> None:
    made = torch.Generator().manual_seed(0)
    heard = [forecast(range(20), (10 + 0.3 * torch.randn(20, generator=made)).tolist()) is not None for _ in range(300)]
    assert sum(heard) <= 2


def test_steps_without_a_number_are_left_out() -> None:
    rooms = [None if step % 3 == 0 else 8.0 - 0.5 * step for step in range(12)]
    found = forecast(range(12), rooms)
    assert found is not None and found.rate == pytest.approx(0.5)
