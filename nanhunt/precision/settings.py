"""One precision setting, from the words that name it: put on around a run, and taken off without a trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import UsageError
from ..internals import eager, op_by_op
from .strict import Strict

_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float64: "float64 double fp64 64",
        torch.float32: "float32 float fp32 32 single",
        torch.float16: "float16 half fp16 16",
        torch.bfloat16: "bfloat16 bf16",
    }.items()
    for name in names.split()
}
_HALVES = (torch.float16, torch.bfloat16)
_SDPA = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# Word -> (the switches of torch.backends it turns, their value).
_MATMUL = "cuda.matmul"
_SWITCHES: dict[str, tuple[tuple[tuple[str, str], ...], bool]] = {
    "tf32": (((_MATMUL, "allow_tf32"), ("cudnn", "allow_tf32")), True),
    "no_tf32": (((_MATMUL, "allow_tf32"), ("cudnn", "allow_tf32")), False),
    "fp16_reduction": (((_MATMUL, "allow_fp16_reduced_precision_reduction"),), True),
    "no_fp16_reduction": (((_MATMUL, "allow_fp16_reduced_precision_reduction"),), False),
    "bf16_reduction": (((_MATMUL, "allow_bf16_reduced_precision_reduction"),), True),
    "no_bf16_reduction": (((_MATMUL, "allow_bf16_reduced_precision_reduction"),), False),
}
_LEGAL = (
    "a dtype (float32, float16, bfloat16, float64), autocast:float16 or autocast:bfloat16, "
    f"{', '.join(_SWITCHES)}, sdpa:{', sdpa:'.join(_SDPA)}, compiled, casts, as_is, several joined by commas such as "
    '"float32,tf32", a torch.dtype, or a second model'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a run computes.

    `dtype`: parameters, buffers and what the model is handed are cast to it. float32 and float64 are meant in
    earnest: casts to less that the code makes itself, autocast's among them, are left out, unless `casts`.
    `autocast` opens autocast around the step; `switches` are words for `torch.backends`; `sdpa` names the only
    backend of scaled dot product attention; `compiled` compiles the model's forward; `model` runs in the place of
    the one that the step calls. What is not named stays as it is.
    """

    label: str
    dtype: torch.dtype | None = None
    casts: bool = False
    autocast: torch.dtype | None = None
    switches: tuple[str, ...] = ()
    sdpa: str | None = None
    compiled: bool = False
    model: nn.Module | None = field(default=None, compare=False)

    @property
    def strict(self) -> bool:
        return self.dtype in (torch.float32, torch.float64) and not (self.casts or self.autocast or self.compiled)

    def lower(self, kind: str) -> str | None:
        """The format that matrix products may be computed in where a step begins, by autocast or TF32."""
        if self.autocast is not None:
            return str(self.autocast).removeprefix("torch.")
        if not self.strict and torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        return "tf32" if kind == "cuda" and _allows_tf32() else None


def parse(given: Any, name: str) -> Setting:
    """The setting that a word, several joined by commas, a torch.dtype or a model stand for; `name` is `a` or `b`.

    Raises:
        UsageError: for what is none of these, naming the legal ones.
    """
    if isinstance(given, Setting):
        return given
    if isinstance(given, nn.Module):
        return Setting(label=f"model {name} ({type(given).__name__})", model=given)
    if isinstance(given, torch.dtype):
        given = str(given).removeprefix("torch.")
    if not isinstance(given, str):
        raise UsageError(f"{name} is a {type(given).__name__}: give {_LEGAL}")
    said: dict[str, Any] = {}
    switches: list[str] = []
    words = [word.strip().lower().removeprefix("torch.") for word in given.split(",")]
    for word in words:
        kind, _, value = word.partition(":")
        if word in _DTYPES:
            _once(said, "dtype", _DTYPES[word], given, name)
        elif kind == "autocast" and _DTYPES.get(value) in _HALVES:
            _once(said, "autocast", _DTYPES[value], given, name)
        elif kind == "sdpa" and value in _SDPA:
            _once(said, "sdpa", value, given, name)
        elif word in _SWITCHES:
            switches.append(word)
        elif word in ("compiled", "casts"):
            said[word] = True
        elif word != "as_is":
            raise UsageError(f"{name}={given!r}: {word!r} is no setting; give {_LEGAL}")
    turned = [one for word in switches for one, _ in [_SWITCHES[word]]]
    if len({*turned}) != len(turned):
        raise UsageError(f"{name}={given!r} turns one switch twice: name each once")
    if said.get("casts") and "dtype" not in said:
        raise UsageError(f"{name}={given!r}: casts goes with a dtype, such as float32,casts")
    return Setting(label=",".join(words), switches=tuple(switches), **said)


def _once(said: dict[str, Any], key: str, value: Any, given: str, name: str) -> None:
    if key in said:
        raise UsageError(f"{name}={given!r} names two for {key}: give one")
    said[key] = value


# --- putting it on ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def put_on(setting: Setting, model: nn.Module, kind: str) -> Iterator[None]:
    """Around one run of a step that calls `model`, whose device is of this `kind`.

    Parameters, buffers, attributes and gradients of the model are not put back: a snapshot does that.
    """
    with contextlib.ExitStack() as stack:
        if setting.model is not None and setting.model is not model:
            stack.enter_context(_in_place_of(model, setting.model))
        if not setting.compiled:  # what the user has compiled runs eagerly: nobody can look into a graph
            eager.hold()
            stack.callback(eager.drop)
            stack.enter_context(op_by_op())
        if setting.dtype is not None:
            _cast(model, setting.dtype)
        if setting.compiled:
            _compile(model)
        for word in setting.switches:
            stack.enter_context(_switched(*_SWITCHES[word]))
        if setting.sdpa is not None:
            stack.enter_context(sdpa_kernel(_SDPA[setting.sdpa]))
        if setting.autocast is not None:
            stack.enter_context(torch.autocast(kind, dtype=setting.autocast))
        if setting.strict:
            assert setting.dtype is not None
            stack.enter_context(Strict(setting.dtype))
        yield


@contextlib.contextmanager
def _in_place_of(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """While open, `model` is `other`: the step that knows the one calls the other."""
    own, kind = vars(model), type(model)
    set_: Callable[..., None] = object.__setattr__
    try:
        set_(model, "__class__", type(other))
        set_(model, "__dict__", vars(other))
    except TypeError:
        set_(model, "__class__", kind)
        raise UsageError(
            f"a {type(other).__name__} cannot stand in the place of a {kind.__name__}: their classes are laid out "
            "in another way; compare models of plain nn.Module classes"
        ) from None
    try:
        yield
    finally:
        set_(model, "__dict__", own)
        set_(model, "__class__", kind)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what the model holds in a float format of 16 bits or more, and what its forward is handed."""
    cast: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None and id(p) not in cast and _floats(p):
                cast[id(p)] = p
                if p.dtype is not dtype:
                    p.grad = None  # of the old dtype; the new one would not be taken
                    p.data = p.data.to(dtype)
        for name, b in module._buffers.items():
            if b is not None and _floats(b):
                if id(b) not in cast:
                    cast[id(b)] = b.to(dtype)
                module._buffers[name] = cast[id(b)]

    def handed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if _floats(tensor) else tensor

    forward = model.forward

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, handed, (args, kwargs))
        return forward(*args, **kwargs)

    vars(model)["forward"] = casting


def _floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.float32, *_HALVES) and not torch.nn.parameter.is_lazy(tensor)


def _compile(model: nn.Module) -> None:
    inner = model.forward
    compiled = torch.compile(inner)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    vars(model)["forward"] = forward


@contextlib.contextmanager
def _switched(places: tuple[tuple[str, str], ...], value: bool) -> Iterator[None]:
    before: list[tuple[Any, str, Any]] = []
    try:
        for path, name in places:
            place: Any = torch.backends
            for part in path.split("."):
                place = getattr(place, part)
            # `allow_tf32` cannot be read while a program uses the newer `fp32_precision`; setting it sets both.
            for each in ("fp32_precision", name) if name == "allow_tf32" else (name,):
                try:
                    before.append((place, each, getattr(place, each)))
                except (RuntimeError, AttributeError):
                    continue
            setattr(place, name, value)
        yield
    finally:
        for place, name, was in reversed(before):
            setattr(place, name, was)


def _allows_tf32() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
