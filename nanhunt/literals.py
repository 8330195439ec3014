"""Was this infinity meant? What a tensor's own history says of it, without the op level.

A mask, a top-k filter, the log-space zero of a CRF put infinities there on purpose. The autograd graph
still knows how such a tensor was made; where there is none, only a -inf is taken for a mask.
"""

from __future__ import annotations

from typing import Any

import torch

# Nodes whose forward writes a value that the program names, and nodes that only hand values on.
_WRITES = (
    "MaskedFill",
    "MaskedScatter",
    "Where",
    "Fill",
    "IndexFill",
    "ConstantPad",
    "CopySlices",
    "IndexPut",
    "Scatter",
)
_HANDS_ON = (
    "View Reshape UnsafeView Expand Squeeze Unsqueeze Transpose Permute T Slice Select Index Gather Alias Cat Stack "
    "Clone ToCopy Split UnsafeSplit Chunk Unbind AsStrided Repeat Flip Roll Copy Neg"
).split()
_REACHES = (
    "Log",
    "Div",
    "Reciprocal",
    "Exp",
    "Pow",
    "Rsqrt",
    "Mul",
    "Mm",
    "Addmm",
    "Bmm",
)  # make infinities themselves
_DEPTH = 12  # nodes to walk back: a mask is used within a few ops of where it is made


def intended(tensor: Any, kinds: tuple[str, ...], builtin: bool, node: str = "") -> bool:
    """True when the infinities of a tensor look meant. A NaN never does.

    `tensor` is None where it is no longer in hand, then `node` is the name of the autograd node that made it;
    `builtin`: a module of torch.nn gave it out.
    """
    if "nan" in kinds or builtin:
        return False
    if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
        return _written(tensor.grad_fn, kinds, _DEPTH)
    return kinds == ("-inf",) and not node.startswith(_REACHES)


def _written(node: Any, kinds: tuple[str, ...], depth: int) -> bool:
    if node is None or depth == 0:
        return False
    name, operands = type(node).__name__, node.next_functions
    if name.startswith("Where") and any(type(one[0]).__name__.startswith("LinalgSlogdet") for one in operands):
        return False  # torch.logdet of a singular matrix
    if name.startswith(_WRITES):
        return True
    if name.startswith(("AddBackward", "SubBackward")):
        # scores + mask: the mask needs no gradient, so it leaves no edge (and neither does a number).
        return len(operands) > 1 and operands[1][0] is None and kinds == ("-inf",) and _plain(operands[0][0])
    if any(name.startswith(word + "Backward") for word in _HANDS_ON):
        return any(_written(one[0], kinds, depth - 1) for one in operands)
    return False


def _plain(node: Any) -> bool:
    """True when the node is no function that reaches an infinity by itself."""
    return node is None or not type(node).__name__.startswith(_REACHES)
