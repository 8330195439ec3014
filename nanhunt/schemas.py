"""What an op is, read from its schema once: its names, what it writes, what it merely re-arranges."""

from __future__ import annotations

from typing import Any

import torch

# Fill their output without reading it: an old value there is nobody's operand.
_OVERWRITES = frozenset(
    "copy fill zero normal uniform bernoulli exponential geometric log_normal cauchy random set trunc_normal".split()
)
_EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize".split())
# Running statistics are written although the schema does not say so.
_NORMS = frozenset(["native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"])
_READS = frozenset(["local_scalar_dense", "is_nonzero", "item"])


def base_name(name: str) -> str:
    """`aten::_foreach_addcdiv_` to `addcdiv`: the arithmetic, whatever the form."""
    name = name.rsplit("::", 1)[-1].strip("_")
    for prefix in ("foreach_", "amp_foreach_"):
        name = name.removeprefix(prefix)
    return name


class Schema:
    """One overload of an op."""

    __slots__ = (
        "base",
        "collective",
        "empty",
        "garbage",
        "name",
        "outputs",
        "overwrites",
        "per_item",
        "random",
        "reads",
        "roles",
        "takes_tensor",
        "views",
        "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = _public(str(func))
        self.base = base_name(schema.name)
        namespace, bare = schema.name.split("::", 1)
        self.takes_tensor = bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"
        self.roles = tuple(a.name for a in schema.arguments)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if bare in _NORMS:
            written += ["running_mean", "running_var"]
        self.writes = frozenset(written)
        self.views = not written and any(r.alias_info is not None for r in schema.returns)
        self.empty = self.base in _EMPTY
        self.random = torch.Tag.nondeterministic_seeded in func.tags or "dropout" in bare
        self.per_item = "foreach_" in bare or bare.startswith("_fused_")
        self.overwrites = frozenset(n for n in written if n == "out" or n.startswith("out") or self.base in _OVERWRITES)
        self.reads = self.base in _READS
        self.collective = namespace.startswith(("c10d", "_c10d", "_dtensor"))
        self.outputs = len(schema.returns)
        # The second output of CTC (log_alpha) holds -inf and memory that was never written, by design.
        self.garbage: frozenset[int] = frozenset((1,)) if self.base in ("ctc_loss", "cudnn_ctc_loss") else frozenset()


def _public(name: str) -> str:
    """`aten.nll_loss_forward.default` is what `aten.nll_loss.default` runs: the latter is what people write."""
    namespace, base, overload = name.split(".", 2)
    bare = base.strip("_").removesuffix("_forward")
    if base.endswith("_forward") and namespace == "aten" and hasattr(torch.ops.aten, bare):
        return f"aten.{bare}.{overload}"
    return name


_schemas: dict[Any, Schema] = {}


def schema_of(func: Any) -> Schema:
    known = _schemas.get(func)
    if known is None:
        known = _schemas[func] = Schema(func)
    return known
