"""What holds for every test: compiled code, and the hooks that were traced into it, do not outlive the test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


def _compilations() -> int:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["frames"]["total"]) if counters else 0


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    before = _compilations()
    yield
    if _compilations() != before:
        import torch

        torch._dynamo.reset()
        torch.nn.Identity()(torch.ones(1))  # the first call of a module after that takes the hooks off
