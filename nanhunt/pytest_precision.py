"""`assert_close_precision`: a test that fails when a model computes with less precision than it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .precision.figures import LINE
from .precision.likeness import Likeness

if TYPE_CHECKING:
    from torch import nn


class PrecisionParts(AssertionError):
    """What `assert_close_precision` raises: the first line is the verdict, `likeness` holds all of it."""

    def __init__(self, text: str, likeness: Likeness) -> None:
        super().__init__(text)
        self.likeness = likeness


def assert_close_precision(
    model: nn.Module,
    step: Callable[..., Any],
    *,
    a: Any = "float32",
    b: Any = "float16",
    cosine: float = LINE,
    gradient_cosine: float | None = None,
    **options: Any,
) -> Likeness:
    """Run a step with two precisions, and fail where a module parts or the outputs are not alike.

    Args:
        model, step, a, b, options: as `nanhunt.compare` takes them.
        cosine: of the outputs, the logits where the model names them; the worst batch must reach it.
        gradient_cosine: of the whole gradient, where that is to be held too.

    Returns:
        The comparison, for further assertions.

    Raises:
        PrecisionParts: an AssertionError, with the page of the comparison.
        UsageError: for arguments that do not fit, and when the model gave nothing that can be compared.
    """
    __tracebackhide__ = True
    for name, bound in (("cosine", cosine), ("gradient_cosine", gradient_cosine)):
        if bound is not None and (
            isinstance(bound, bool) or not isinstance(bound, (int, float)) or not -1 <= bound <= 1
        ):
            raise UsageError(f"{name}={bound!r}: give the least similarity, between -1 and 1, such as {LINE}")
    from .precision.control import compare

    found = compare(model, step, a=a, b=b, **options)
    if not found.calls:  # switched off
        return found
    said = _failure(found, cosine, gradient_cosine)
    if said is not None:
        raise PrecisionParts(said if said == str(found) else f"{said}\n\n{found}", found)
    return found


def _failure(found: Likeness, cosine: float, gradient_cosine: float | None) -> str | None:
    """Why the two are not close, the reason in the first line; None when they are."""
    if found.first is not None or found.not_finite is not None or found.died is not None:
        return str(found)
    if found.broken:
        return f"the gradients of {found.b} are not finite where those of {found.a} are"
    if found.output_cosine != found.output_cosine:
        raise UsageError("the model gave no floating-point numbers, so there is no output to compare")
    if found.output_cosine < cosine:
        return f"the cosine of the outputs of {found.b} and {found.a} is {found.output_cosine:.6f}, below {cosine}"
    if gradient_cosine is not None and not found.gradient_cosine >= gradient_cosine:
        told = "there are no gradients" if found.gradient_cosine != found.gradient_cosine else None
        told = told or f"the cosine of the gradients is {found.gradient_cosine:.6f}, below {gradient_cosine}"
        return f"{told} ({found.b} and {found.a})"
    return None
