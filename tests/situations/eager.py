"""All the eager situations, by name."""

from . import (  # noqa: F401  each import files its situations
    attention,
    calls,
    checkpointing,
    compilers,
    gradmodes,
    inplace,
    interrupts,
    layouts,
    modes,
    oddities,
    outputs,
    precision,
    saving,
    threads,
    training,
    transforms,
    values,
    watches,
)
from .models import situation

SITUATIONS = dict(sorted(situation.items()))
