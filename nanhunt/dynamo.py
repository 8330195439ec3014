"""The private corners of torch.compile that are leaned on, each with what happens when it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

Step = tuple[bool, Any]  # (by attribute?, name or index)

_DICT = "_base_vt"  # where the variable of a subclass of dict keeps its entries
_DYNAMO: Any = getattr(torch._C, "_dynamo", None)
_frames: Any = getattr(_DYNAMO, "eval_frame", None)


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compiler.assume_constant_result does, without its import of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def run_plainly(function: Callable[..., Any], *, inside: bool = True) -> Callable[..., Any]:
    """Have dynamo run `function`, and (`inside`) all that it calls, as Python where it meets it as a frame of its own.

    Where it is called from a frame that is traced, it is still traced into that frame's graph.
    """
    code = function.__code__
    action, strategy = (getattr(_frames, name, None) for name in ("_FrameAction", "_FrameExecStrategy"))
    if action is not None and strategy is not None:
        _frames.set_code_exec_strategy(code, strategy(action.SKIP, action.SKIP if inside else action.DEFAULT))
        return function
    skip = getattr(_frames, "skip_code", None)
    if skip is not None:  # torch 2.6: the frame itself, not what it calls
        skip(code)
    return function


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, while dynamo looks away: for where `run_plainly` does not reach what is called."""
    if hasattr(_frames, "_FrameExecStrategy") or not hasattr(_frames, "set_eval_frame"):
        return function

    def plain(*args: Any) -> None:
        before = _frames.set_eval_frame(None)
        try:
            function(*args)
        finally:
            _frames.set_eval_frame(before)

    return run_plainly(plain)


def symbolic(tensors: Any) -> bool:
    """True for the tensors that a compiler puts in the place of the program's while it looks what a backward does."""
    return isinstance(tensors, tuple) and any(type(t).__name__ in ("FunctionalTensor", "FakeTensor") for t in tensors)


def compiler_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def compiled_codes(code: Any) -> list[Any]:
    """The code objects that dynamo has made of `code` and may run in its place."""
    entries = getattr(_frames, "_debug_get_cache_entry_list", None)
    if entries is None or not compiler_loaded():
        return []
    return [entry.code for entry in entries(code)]


def on_compiled(hook: Callable[[Any, Any], None]) -> Any:
    """Call `hook(code, new code)` for each frame that dynamo compiles from now on; None where that cannot be had."""
    if not compiler_loaded():
        return None
    register = getattr(sys.modules.get("torch._dynamo.convert_frame"), "register_bytecode_hook", None)
    return register(hook) if register is not None else None


def keep_address(tensor: torch.Tensor) -> torch.Tensor:
    """Tell the compiler that `tensor` stays where it is, as a parameter does: CUDA graphs may then write to it."""
    mark = getattr(sys.modules.get("torch._dynamo"), "mark_static_address", None)
    if mark is not None:
        mark(tensor, guard=False)
    return tensor


class Tracing:
    """What dynamo knows where a `comptime` call stands in the code that it traces."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        self.graph: Any = self.translator.output

    def variable(self, name: str, above: int = 0) -> Any:
        """The variable of a local, `above` frames up."""
        return self._context.get_local(name, stacklevel=above)._i_will_not_complain_if_bc_breaks_VariableTracker()

    def bodies(self) -> list[str]:
        """The higher-order ops (checkpoint, cond, ...) in whose body the code stands."""
        names = []
        tracer = self.graph.current_tracer
        while tracer is not None and tracer.parent is not None:
            target = getattr(tracer, "source_target", None)
            names.append(str(getattr(target, "__name__", target)))
            tracer = tracer.parent
        return names

    def lines(self) -> Iterator[tuple[str, int]]:
        """File and line of each traced frame, innermost first."""
        translator = self.translator
        while translator is not None:
            yield translator.f_code.co_filename, int(translator.lineno)
            translator = getattr(translator, "parent", None)


# --- variables of dynamo ------------------------------------------------------------------------------


def tensors(tracing: Tracing, variable: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """The tensors in a variable, each with the way that reaches it; other containers than these are passed over."""
    variable = _real(variable)
    if len(path) > 6 or variable is None:
        return
    node = _part(_part(variable, "proxy"), "node")
    if node is not None:
        if isinstance(node.meta.get("example_value"), torch.Tensor):
            yield path, variable
        return
    for step, part in (*enumerate(items(variable)), *entries(variable)):
        yield from tensors(tracing, part, (*path, (False, step)))
    for name in _fields(variable):
        yield from tensors(tracing, variable.var_getattr(tracing.translator, name), (*path, (True, name)))


def _real(variable: Any) -> Any:
    """The variable behind a lazy one; None for one that is no tensor or plain container: that adds guards."""
    if type(variable).__name__ != "LazyVariableTracker":
        return variable
    if not variable.is_realized() and not isinstance(variable.peek_value(), (torch.Tensor, tuple, list, dict)):
        return None
    return variable.realize()


def _part(variable: Any, name: str) -> Any:
    """An attribute of a variable, None where it has none: some raise another error than that."""
    try:
        return getattr(variable, name, None)
    except NotImplementedError:
        return None


def items(variable: Any) -> list[Any]:
    found = _part(_real(variable), "items")
    return found if isinstance(found, list) else []


def entries(variable: Any) -> list[tuple[Any, Any]]:
    """The entries of a mapping whose keys are words or numbers."""
    variable = _real(variable)
    table = _part(variable, "items")
    if not isinstance(table, dict):  # a ModelOutput, and other subclasses of dict
        table = _part(_part(variable, _DICT), "items")
    if not isinstance(table, dict):
        return []
    found = []
    for key, part in table.items():
        inner: Any = getattr(key, "vt", key)
        value = inner.as_python_constant() if getattr(inner, "is_python_constant", lambda: False)() else None
        if type(value) in (str, int):
            found.append((value, part))
    return found


def _fields(variable: Any) -> list[str]:
    """The fields of a dataclass that is no container as well."""
    if type(variable).__name__ != "UserDefinedObjectVariable":
        return []
    return list(getattr(variable.python_type(), "__dataclass_fields__", ()))


def suffix(path: tuple[Step, ...]) -> str:
    return "".join(f".{step}" if attribute else f"[{step!r}]" for attribute, step in path)
