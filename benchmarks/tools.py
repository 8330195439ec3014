"""The ways of watching: nanhunt in its levels, what stands in for it elsewhere, and the floors under all of them."""

from __future__ import annotations

import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

import nanhunt

from .models import Program
from .pairs import Step

Around = Callable[[Program, Step], AbstractContextManager[Step]]
_LARGE = ("gpt", "resnet")
PART: Any = object()  # stands for the program's own `part` in the options of a watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One row: `around(program, step)` attaches the tool, gives the step to run with it, and takes it off again."""

    name: str
    around: Around
    kind: str = "peer"  # nanhunt, floor or peer
    modes: tuple[str, ...] = ("train", "infer")
    cycle: int = 1  # after so many steps its cost repeats
    share: int = 1  # of the time
    missing: str | None = None  # why it cannot be measured here
    apart: bool = False  # leaves something behind in the process, so it gets one of its own
    models: tuple[str, ...] = ()  # only these: a step of many tiny ops would take minutes; empty for all

    def why_not(self, model: str) -> str | None:
        """Why it is not measured on a model, or None."""
        slow = self.models and model not in self.models
        return self.missing or (f"too slow on {model}" if slow else None)


# --- nanhunt --------------------------------------------------------------------------------------

WATCHES: dict[str, dict[str, Any]] = {
    "nanhunt, module": {"detail": "module"},
    "nanhunt, auto": {"detail": "auto"},
    "nanhunt, forward only": {"detail": "auto", "backward": False},
    "nanhunt, one block": {"detail": "auto", "only": PART},
    "nanhunt, every=10": {"detail": "auto", "every": 10},
    "nanhunt, op": {"detail": "op"},
}
# The watch of a compiled model, from before its first call.
COMPILED: dict[str, Any] = {"detail": "auto"}


@contextmanager
def watched(program: Program, step: Step, options: dict[str, Any]) -> Iterator[Step]:
    given: dict[str, Any] = {key: (program.part,) if value is PART else value for key, value in options.items()}
    with nanhunt.watch(program.model, program.optimizer, **given):
        yield step


@contextmanager
def hunted(program: Program, step: Step) -> Iterator[Step]:
    yield lambda: nanhunt.hunt(step, model=program.model, optimizer=program.optimizer)


def lacking(options: dict[str, Any]) -> str | None:
    """The option that this nanhunt does not have, in words."""
    known = inspect.signature(nanhunt.watch).parameters
    wrong = [name for name in options if name not in known]
    return f"this nanhunt has no option {wrong[0]}" if wrong else None


def _watches(**always: Any) -> list[Tool]:
    tools = []
    for name, given in WATCHES.items():
        options = given if given["detail"] == "op" else given | always
        slow = options["detail"] == "op"
        tools.append(
            Tool(
                name=name,
                around=partial(watched, options=options),
                kind="nanhunt",
                modes=("train",) if {"backward", "every"} & options.keys() else ("train", "infer"),
                cycle=options.get("every", 1),
                share=1 if slow else 4,
                missing=lacking(options),
            )
        )
    return [*tools, Tool(name="nanhunt.hunt", around=hunted, kind="nanhunt", modes=("train",))]


# --- floors ---------------------------------------------------------------------------------------


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors in what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors(part)


@contextmanager
def reduced(program: Program | None, step: Step, reduce: Callable[[Tensor], object]) -> Iterator[Step]:
    """Reduce every module output and its gradient once, through hooks that do nothing else, and read nothing."""

    def gradient(grad: Tensor) -> None:
        reduce(grad)

    def output(module: nn.Module, args: Any, out: Any) -> None:
        for tensor in (out,) if type(out) is Tensor else tensors(out):
            if tensor._backward_hooks:  # its child returned it, and it was looked at then
                continue
            reduce(tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    handle = nn.modules.module.register_module_forward_hook(output)
    try:
        yield step
    finally:
        handle.remove()


def nothing(tensor: Tensor) -> None:
    """Hooks alone."""


FLOORS: dict[str, Callable[[Tensor], object]] = {
    "floor: empty hooks": nothing,
    "floor: one sum": torch.sum,
    "floor: one aminmax": torch.aminmax,
}


# --- what users do without a tool ------------------------------------------------------------------


@contextmanager
def same(program: Program, step: Step) -> Iterator[Step]:
    yield step


@contextmanager
def anomaly(program: Program, step: Step) -> Iterator[Step]:
    with torch.autograd.set_detect_anomaly(True):
        yield step


class Stopped(Exception):
    """What the naive hooks raise."""


def _all_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _sum_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.float().sum()))


@contextmanager
def hooked(program: Program, step: Step, fine: Callable[[Tensor], bool], backward: bool) -> Iterator[Step]:
    """A check of every output, and with `backward` of every gradient of an output, by hooks on each module."""

    def check(module: nn.Module, given: Any, out: Any) -> None:
        for tensor in tensors(out):
            if not fine(tensor.detach()):
                raise Stopped(type(module).__name__)

    with ExitStack() as stack:
        for module in program.model.modules():
            stack.callback(module.register_forward_hook(check).remove)
            if backward:
                stack.callback(module.register_full_backward_hook(check).remove)
        yield step


# --- other people's tools --------------------------------------------------------------------------


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """Take off what a tool hangs on modules and parameters without a way to remove it."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    tables: list[dict[int, Any]] = [vars(module)[name] for module in model.modules() for name in names]
    before = [set(table) for table in tables]
    full = [(module, module._is_full_backward_hook) for module in model.modules()]
    unhooked = [parameter for parameter in model.parameters() if not parameter._backward_hooks]
    try:
        yield
    finally:
        for table, known in zip(tables, before):
            for key in table.keys() - known:
                del table[key]
        for module, was in full:
            module._is_full_backward_hook = was
        for parameter in unhooked:
            if parameter._backward_hooks:
                parameter._backward_hooks.clear()


@contextmanager
def underflow_overflow(program: Program, step: Step) -> Iterator[Step]:
    from transformers.debug_utils import DebugUnderflowOverflow

    with taken_off(program.model):
        DebugUnderflowOverflow(program.model)  # type: ignore[no-untyped-call]
        yield step


@contextmanager
def nndiagnostics(program: Program, step: Step) -> Iterator[Step]:
    with taken_off(program.model):
        import_module("diagnostics").register_inf_check_hooks(program.model)
        yield step


@contextmanager
def sherlorch(program: Program, step: Step) -> Iterator[Step]:
    with import_module("sherlorch").trace(capture_stack=True) as tracker:
        tracker.watch(program.model)

        def run() -> None:
            step()
            tracker.reset()

        yield run


@contextmanager
def torchlens(program: Program, step: Step) -> Iterator[Step]:
    """Its search for a NaN runs the forward pass itself, so it is compared with a forward pass."""
    find_nan = import_module("torchlens").debug.find_nan
    (given,) = program.inputs.values()

    def run() -> None:
        with torch.no_grad():
            find_nan(program.model, given)

    yield run


@contextmanager
def msprobe(program: Program, step: Step) -> Iterator[Step]:
    with redirect_stdout(io.StringIO()):
        precision_debugger = import_module("msprobe.pytorch").PrecisionDebugger
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # it tells of every step
        debugger = precision_debugger(dump_path=folder, task="statistics", level="L0")

        def run() -> None:
            debugger.start(model=program.model)
            step()
            debugger.stop()
            debugger.step()

        yield run


def absent(distribution: str) -> str | None:
    """Why a package cannot be measured: it is not installed."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    return None


def tools(**always: Any) -> list[Tool]:
    """Every row, in the order of the tables. The first is the step against itself: the noise.

    `always` are further options for every watch that is not at op level.
    """
    return [
        Tool(name="bare again", around=same, kind="floor", share=4),
        *(
            Tool(name=name, around=partial(reduced, reduce=reduce), kind="floor", share=2)
            for name, reduce in FLOORS.items()
            if reduce is not nothing
        ),
        *_watches(**always),
        Tool(name="sum of each output", around=partial(hooked, fine=_sum_finite, backward=False)),
        Tool(name="isfinite().all(), forward", around=partial(hooked, fine=_all_finite, backward=False)),
        Tool(
            name="isfinite().all(), and full backward hooks",
            around=partial(hooked, fine=_all_finite, backward=True),
            modes=("train",),
        ),
        Tool(name="anomaly mode", around=anomaly, modes=("train",)),
        Tool(name="DebugUnderflowOverflow", around=underflow_overflow, missing=absent("transformers")),
        Tool(name="nndiagnostics", around=nndiagnostics, missing=absent("nndiagnostics")),
        Tool(name="sherlorch", around=sherlorch, missing=absent("sherlorch"), models=_LARGE),
        Tool(
            name="torchlens", around=torchlens, missing=absent("torchlens"), modes=("infer",), apart=True, models=_LARGE
        ),
        Tool(
            name="msprobe",
            around=msprobe,
            missing=absent("mindstudio-probe"),
            modes=("train",),
            apart=True,
            models=_LARGE,
        ),
    ]


def named(wanted: list[str] | None = None) -> list[Tool]:
    """The tools whose names contain one of the wanted words; all without words."""
    return [tool for tool in tools() if wanted is None or any(word in tool.name for word in wanted)]
