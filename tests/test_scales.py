"""The window of safe loss scales, against what casting to the format really does."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.monitor.scales import Window, window
from nanhunt.monitor.shares import Entries, Moved, Part, infinite, weights


def _histogram(grads: np.ndarray) -> dict[int, float]:
    entries = Entries()
    entries.add(grads, np.ones(len(grads)), 1.0, "float16")
    return entries.histogram


def _cast(grads: np.ndarray, scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (grads * scale).astype(np.float16)


def _grads(seed: int, centre: float, spread: float) -> np.ndarray:
    noise = np.random.default_rng(seed)
    return noise.choice([-1.0, 1.0], 4000) * 2.0 ** noise.normal(centre, spread, 4000)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), centre=st.floats(-60, 20), spread=st.floats(0.1, 6))
def test_the_window_is_where_the_cast_neither_overflows_nor_loses(seed: int, centre: float, spread: float) -> None:
    """At `high` nothing overflows and at twice that something does; at `low` less than the share is lost, and at
    half of it as much or more."""
    grads = _grads(seed, centre, spread)
    absmax = float(np.abs(grads).max())
    found = window(_histogram(grads), absmax, "float16", share=1e-2)
    assert np.isfinite(_cast(grads, found.high)).all()
    assert not np.isfinite(_cast(grads, 2.0 * found.high)).all() or absmax * 2 * found.high < 65_520
    zero = (_cast(grads, found.low) == 0).mean()
    assert zero < 1e-2 <= (_cast(grads, found.low / 2) == 0).mean()
    assert math.log2(found.low) % 1 == 0 and math.log2(found.high) % 1 == 0


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**20])
def test_the_lost_share_is_that_of_the_cast(scale: float) -> None:
    """What the current scale loses is counted as the cast loses it."""
    grads = _grads(1, -30, 4)
    found = window(_histogram(grads), float(np.abs(grads).max()), "float16", current=scale)
    assert found.lost == pytest.approx((_cast(grads, scale) == 0).mean(), abs=1e-9)


def test_the_current_scale_is_judged() -> None:
    """Inside, above with the name of the parameter that overflows first, below with the share that is lost."""
    histogram = {-20: 10.0, -10: 980.0, -4: 10.0}

    def at(scale: float) -> Window:
        return window(histogram, 0.12, "float16", current=scale, largest="head.weight")

    assert at(1024.0).fits and "is inside" in str(at(1024.0))
    assert at(2.0**24).fits is False and "head.weight is the first to overflow" in str(at(2.0**24))
    below = window({-40: 10.0, -10: 990.0}, 0.12, "float16", current=1.0)
    assert below.fits is False and "1.0% of the nonzero gradients are rounded to zero" in str(below)
    assert window(histogram, 0.12, "float16").fits is None


def test_a_bad_gradient_has_no_window() -> None:
    """An infinite gradient overflows at every scale, and the sentence names its parameter."""
    found = window({0: 1.0}, math.inf, "float16", current=2.0, largest="fc.bias")
    assert found.high == 0.0 and not found.fits
    assert "fc.bias" in str(found)


def test_a_spread_wider_than_the_format_has_no_safe_scale() -> None:
    """40 binades do not fit: the window is empty, and says on which side what happens."""
    found = window({-45: 100.0, 10: 100.0}, 1500.0, "float16", current=1.0)
    assert found.low > found.high and "no loss scale is safe" in str(found)


def test_all_zero_gradients_suit_every_scale() -> None:
    """Nothing can be lost and nothing can overflow."""
    found = window({}, 0.0, "float16", current=65536.0)
    assert found.low == 0.0 and found.fits and found.lost == 0.0


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"share": 0.0}, {"share": 2}])
def test_bad_input_is_refused_in_words(wrong: dict[str, object]) -> None:
    """A dtype that is no float format, a share that is none."""
    given_ = {"dtype": "float16", "share": 0.1, **wrong}
    with pytest.raises(UsageError, match=r"dtype=|share="):
        window({0: 1.0}, 1.0, str(given_["dtype"]), share=given_["share"])  # type: ignore[arg-type]


# --- the sampled shares -----------------------------------------------------------------------------


def test_the_sample_stands_for_the_whole() -> None:
    """A tensor of 1000 numbers of which 10 were taken weighs as much as one of 1000 that was taken whole."""
    weight = weights([Part(name="a", count=10, numel=1000), Part(name="b", count=5, numel=5)])
    assert weight.sum() == 1005 and weight[0] == 100 and weight[-1] == 1


def test_moved_weights_are_told_from_those_that_stand_still() -> None:
    """Ratio and share, with zero gradients and non-finite weights left out."""
    moved = Moved()
    before = np.array([1.0, 2.0, 3.0, np.nan, 4.0])
    after = np.array([1.0, 2.5, 3.0, np.nan, np.inf])
    moved.add(before, after, np.array([1.0, 1.0, 0.0, 1.0, 1.0]), np.ones(5))
    assert moved.lost == 0.5  # of the first two
    assert moved.ratio == pytest.approx(0.5 / np.sqrt(14))
    assert Moved().lost is None and Moved().ratio is None


def test_small_entries_are_those_the_format_holds_as_subnormals() -> None:
    """Of the nonzero entries, times the loss scale; what is not finite counts nowhere."""
    entries = Entries()
    grads = np.array([0.0, 1e-6, 1e-6, 1.0, np.nan, np.inf])
    entries.add(grads, np.ones(6), 1.0, "float16")
    assert entries.zero_share == 0.25 and entries.small_share == pytest.approx(2 / 3)
    scaled = Entries()
    scaled.add(grads, np.ones(6), 1024.0, "float16")
    assert scaled.small_share == 0.0
    assert sum(scaled.histogram.values()) == 3 and scaled.histogram[0] == 1


def test_infinite_moments_are_weighed() -> None:
    """An infinity in a sample of a large tensor counts for all that it stands for."""
    assert infinite(np.array([np.inf, 1.0, np.nan]), np.array([10.0, 1.0, 1.0])) == (10.0, 12.0)
