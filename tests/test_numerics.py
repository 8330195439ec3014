"""Formats agree with torch and with their bits; headroom and numbers for human eyes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanhunt.numerics import COMPARED, FORMATS, Format, bits_over, fmt, format_of, headroom_bits, headrooms


def torch_floats():
    torch = pytest.importorskip("torch")
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}
    return sorted((d for d in dtypes if "float4" not in str(d)), key=str)  # torch has no finfo for float4


@pytest.mark.parametrize("dtype", torch_floats(), ids=str)
def test_every_format_agrees_with_finfo(dtype):
    import torch

    form, info = format_of(dtype), torch.finfo(dtype)
    assert form is not None
    assert (form.bits, form.max, form.smallest_normal) == (info.bits, info.max, info.smallest_normal)
    if form.name == "float8_e5m2fnuz":
        # torch 2.13 says 0.125, but the number after 1 is 1.25: two bits of mantissa.
        assert info.eps in (0.125, 0.25)
    else:
        assert form.eps == info.eps


@pytest.mark.parametrize("dtype", [d for d in torch_floats() if d.itemsize <= 2], ids=str)
def test_every_format_agrees_with_all_its_bit_patterns(dtype):
    import torch

    form = format_of(dtype)
    assert form is not None
    codes = torch.arange(1 << form.bits, dtype=torch.int32)
    values = codes.to({1: torch.uint8, 2: torch.uint16}[dtype.itemsize]).view(dtype).to(torch.float64)
    finite = values[values.isfinite()]
    assert finite.max() == form.max
    assert finite[finite > 0].min() == form.smallest_subnormal
    assert bool(values.isinf().any()) is form.has_inf
    assert finite[finite > 1].min() - 1 == form.eps


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_wide_formats_step_where_they_say(name):
    import torch

    form, dtype = FORMATS[name], getattr(torch, name)
    zero, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    assert torch.nextafter(zero, one).item() == form.smallest_subnormal
    assert (torch.nextafter(one, 2 * one) - one).item() == form.eps
    assert torch.tensor(form.max, dtype=dtype).mul(2).isinf() == form.has_inf


def test_the_format_which_cannot_say_infinity_is_known():
    assert not FORMATS["float8_e4m3fn"].has_inf
    assert FORMATS["float8_e5m2"].has_inf


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.float16", "float16"),
        ("half", "float16"),
        ("complex64", "float32"),
        ("torch.complex32", "float16"),
        ("complex128", "float64"),
        ("float8_e5m2", "float8_e5m2"),
    ],
)
def test_names_lead_to_formats(name, expected):
    assert format_of(name) is FORMATS[expected]


@pytest.mark.parametrize("name", ["int64", "bool", "", None, "float4_e2m1fn_x2"])
def test_what_is_no_float_has_no_format(name):
    assert format_of(name) is None
    assert headroom_bits(1.0, name) is None


def test_a_format_is_a_value():
    with pytest.raises(AttributeError):
        FORMATS["float16"].max = 1.0  # type: ignore[misc]
    assert isinstance(FORMATS["float16"], Format)


@pytest.mark.parametrize(
    ("absmax", "dtype", "bits"),
    [
        (65504.0, "float16", 0.0),
        (32752.0, "float16", 1.0),
        (131008.0, "float16", -1.0),
        (0.0, "float16", math.inf),
        (math.inf, "float32", -math.inf),
        (-448.0, "float8_e4m3fn", 0.0),
        (5e-324, "float64", 2098.0),
    ],
)
def test_headroom_is_the_number_of_doublings_left(absmax, dtype, bits):
    assert headroom_bits(absmax, dtype) == pytest.approx(bits)
    assert bits_over(absmax, dtype) == pytest.approx(-bits)


def test_headroom_of_nothing_known_is_unknown():
    assert headroom_bits(None, "float16") is None
    assert bits_over(None, "float16") is None
    assert math.isnan(headroom_bits(math.nan, "float16") or 0.0)
    assert headrooms(None) == dict.fromkeys(COMPARED)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.sampled_from(sorted(FORMATS)))
def test_headroom_is_negative_exactly_when_it_does_not_fit(size, name):
    room = headroom_bits(size, name)
    assert room is not None
    if size > FORMATS[name].max * 1.0001:
        assert room < 0
    if size <= FORMATS[name].max:
        assert room >= 0


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (71280.0, "71 280"),
        (-71280.4, "-71 280"),
        (65504, "65 504"),
        (1.2e30, "1.2e+30"),
        (6.103515625e-05, "6.1e-05"),
        (0.25, "0.25"),
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (12.3456, "12.35"),
        (999.97, "1 000"),
        (16777216, "16 777 216"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (None, "?"),
        (10**400, "1e+400"),
        (-(10**400), "-1e+400"),
        (True, "True"),
    ],
)
def test_numbers_for_human_eyes(number, text):
    assert fmt(number) == ("1" if number is True else text)


@given(st.one_of(st.floats(), st.integers()))
def test_numbers_are_short_and_close(number):
    text = fmt(number)
    assert len(text) <= 20
    try:
        exact = float(number)
    except OverflowError:
        return
    if abs(exact) < 1.79e308:
        assert float(text.replace(" ", "")) == pytest.approx(exact, rel=6e-3)
