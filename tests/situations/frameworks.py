"""All the framework situations, by name."""

from . import huggingface, trainers  # noqa: F401  each import files its situations
from .installed import framework

FRAMEWORKS = dict(framework)
