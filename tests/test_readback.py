"""Small tensors come back as they were, by one copy a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanhunt.monitor.readback import Readback

TENSORS = {
    "float32": torch.tensor([1.5, float("nan"), float("inf")]),
    "float64": torch.tensor([1e300]),
    "bfloat16": torch.tensor([3.0, 1e30], dtype=torch.bfloat16),
    "float16": torch.tensor(6e-8, dtype=torch.float16),
    "int64": torch.tensor([2**62 + 1, -3]),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.tensor([1 + 2j]),
    "strided": torch.arange(10.0)[::3],
}


@pytest.mark.parametrize("pack", [False, True])
def test_every_dtype_comes_back_exactly(pack: bool) -> None:
    """Packed into bytes or read in place: the same numbers, in several portions too, and as often as one asks."""
    reads = Readback(pack=pack)
    for i, (key, tensor) in enumerate(TENSORS.items()):
        reads.add(key, tensor)
        assert np.array_equal(np.asarray(reads.peek(key)), _plain(tensor), equal_nan=True)
        if i == 3:
            reads.send()
    assert reads.ready() is not pack
    for _ in range(2):
        values = reads.values()
        assert reads.ready() and values.keys() == TENSORS.keys()
        for key, tensor in TENSORS.items():
            assert np.array_equal(values[key], _plain(tensor), equal_nan=True), key


def _plain(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return tensor.reshape(-1).numpy()


def test_one_number_is_copied_at_once() -> None:
    """A loss that the program overwrites afterwards, a scale that the scaler updates in place."""
    for pack in (False, True):
        reads, scale = Readback(pack=pack), torch.tensor(4.0)
        reads.add("scale", scale)
        scale.fill_(2.0)
        assert reads.values()["scale"][0] == 4.0


def test_nothing_is_asked_for_that_is_not_there() -> None:
    """A key that nobody added is None when it is peeked at, and no values are an empty table."""
    reads = Readback(pack=True)
    assert reads.peek("loss") is None and reads.values() == {}
