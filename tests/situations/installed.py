"""The catalogue of framework situations, which skip where their framework is not installed."""

import os
from typing import Any

import pytest

from .harness import Catalogue

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

framework = Catalogue()


def needs(name: str) -> Any:
    """The framework, or the test is skipped with the reason."""
    return pytest.importorskip(name, reason=f"{name} is not installed")
