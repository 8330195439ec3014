"""The right answer to a plant, from the step run without any tool: an oracle that knows nothing of nanhunt."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from planting import Plant, fingerprint, floating, is_bad, key_of, kinds_in, leaves, planted, state_of
from specimens import Specimen
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# Why a plant has no right answer that could be checked. None of these looks at what a tool said.
REASONS = {
    "not_called": "the step never calls this module (a list of modules, a projection read by its parent)",
    "no_floating_output": "the module returns no floating tensor that a fault could stand in",
    "never_read": "no operation of the step reads this parameter or buffer, so no module can be named",
    "shared_gradient": "the first gradient to go bad is that of a tensor which several modules read, or which the "
    "planted module returns and reads itself; whose term is bad shows between operations only",
    "standing_inf": "an infinity that stands in a buffer is intent until it turns into a NaN; here it did harm "
    "without one, or turned in more than one module or in backward",
    "in_place": "a fault put between a module that overwrites its input and the next one changes whose tensor it is",
    "mask_like": "a -inf that is added where no graph is recorded is what a mask is; only operations tell them apart",
    "computed_or_literal": "an infinity in the root's output that reaches no loss and no gradient: a fault if it was "
    "computed, none if it was a literal; module level sees no operations and cannot know",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool says: which phase, which module, which kind; ``tensor`` only counts for a bad parameter."""

    phase: str
    module: str | None
    kind: str
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The right answer to a plant: an exclusion, silence (no ``phase``), or these values."""

    excluded: str | None = None
    harm: tuple[str, ...] = ()
    after: str | None = None  # fingerprint of the model after a step without harm
    phase: str | None = None
    modules: tuple[str | None, ...] = ()
    kinds: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def allows(self, answer: Answer | None) -> bool:
        if answer is None or self.phase is None:
            return answer is None and self.phase is None
        return (
            answer.phase == self.phase
            and answer.module in self.modules
            and answer.kind in self.kinds
            and (not self.tensors or answer.tensor in self.tensors)
        )


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[str]]:
    """The stack of module calls; the last one is the module whose own code runs now."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(names.get(id(module), "?"))

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as handles:
        handles.callback(hooks.register_module_forward_pre_hook(enter).remove)
        handles.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
        yield running


@dataclass(frozen=True, slots=True)
class BadGradient:
    """A bad gradient that left a module: of an output or input (``key``), or of a parameter."""

    kinds: tuple[str, ...]
    key: object = None
    parameter: str | None = None


@contextmanager
def bad_gradients(model: nn.Module, readers: dict[object, set[str]] | None = None) -> Iterator[list[BadGradient]]:
    """Every bad gradient, in the order in which they are seen; ``readers`` takes which modules read each tensor."""
    bad: list[BadGradient] = []
    paths = {id(module): path for path, module in model.named_modules()}

    def see(gradient: Tensor | None, key: object = None, parameter: str | None = None) -> None:
        if gradient is not None and is_bad(gradient):
            bad.append(BadGradient(kinds_in(gradient), key, parameter))

    def left(module: nn.Module, inputs: Any, output: Any) -> None:
        if readers is not None and id(module) in paths:
            for tensor in floating(inputs):
                if tensor.grad_fn is not None:
                    readers.setdefault(key_of(tensor), set()).add(paths[id(module)])
        for tensor in floating(inputs) + floating(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(see, key=key_of(tensor)))  # type: ignore[no-untyped-call]

    with ExitStack() as handles:
        handles.callback(hooks.register_module_forward_hook(left).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_post_accumulate_grad_hook
                handles.callback(hook(lambda p, name=name: see(p.grad, parameter=name)).remove)
        yield bad


def _holds(path: str, other: str) -> bool:
    """Whether one module stands inside the other."""
    return other.startswith(path + ".") if path else True


class _Readers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which modules' own code reads each parameter and buffer, the first one first."""

    def __init__(self, model: nn.Module, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {t.untyped_storage()._cdata: name for name, t in state_of(model).items()}
        self.running = running
        self.found: dict[str, dict[str | None, None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = tree_flatten((args, kwargs or {}))[0]
        if func.overloadpacket.__name__ in ("copy_", "zero_", "fill_"):
            read = read[1:]
        for value in read:
            if isinstance(value, Tensor) and type(value).__name__ != "FakeTensor":
                name = self.names.get(value.untyped_storage()._cdata)
                if name is not None:
                    self.found.setdefault(name, {})[self.running[-1] if self.running else None] = None
        return func(*args, **kwargs or {})


class _Turns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where a NaN appears in operations that were given none: (phase, module), in order."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.found: dict[tuple[str, str | None], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = any(t.isnan().any() for t in floating(tree_flatten((args, kwargs or {}))[0]))
        output = func(*args, **kwargs or {})
        memory = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
        if not given and not memory and any(t.isnan().any() for t in floating(output)):
            # A recomputation runs inside the backward too, but with gradients on.
            outside = torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()
            phase = "forward" if outside else "backward"
            self.found[phase, self.running[-1] if self.running else None] = None
        return output


@dataclass(frozen=True, slots=True)
class Oracle:
    """Runs planted steps unwatched and says what the right answer is."""

    specimen: Specimen
    readers: dict[str, tuple[str | None, ...]] = field(init=False)
    aliases: dict[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        specimen, model = self.specimen, self.specimen.model
        specimen.restore()
        harm = self._harm(specimen.optimizer(), None)
        if harm:
            raise ValueError(f"{specimen.name} is not healthy before anything is planted: {', '.join(harm)}")
        specimen.restore()
        with running_modules(model) as running, _Readers(model, running) as readers:
            specimen.model(**specimen.batch)
        specimen.restore()
        object.__setattr__(self, "readers", {name: tuple(found) for name, found in readers.found.items()})
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        groups: dict[int, list[str]] = {}
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
        object.__setattr__(self, "aliases", {names[0]: tuple(names) for names in groups.values()})

    def _harm(self, optimizer: torch.optim.Optimizer, standing: str | None) -> tuple[str, ...]:
        """Runs the step and lists what is bad after it; an Inf that stood in ``standing`` is none."""
        model = self.specimen.model
        before = state_of(model)[standing].detach().clone() if standing else None
        try:
            output, loss = self.specimen.step(optimizer)
        except Exception as error:
            return (f"the step died of it: {type(error).__name__}",)
        found = [f"output{name}" for name, t in leaves(output) if is_bad(t)]
        found += ["loss"] * is_bad(loss)
        found += [f"grad of {n}" for n, p in model.named_parameters() if p.grad is not None and is_bad(p.grad)]
        for name, tensor in state_of(model).items():
            if name == standing and before is not None:
                changed = tensor.detach()[~((tensor == before) & before.isinf())]
                found += [name] * is_bad(changed)
            else:
                found += [name] * is_bad(tensor)
        for state in optimizer.state.values():
            found += [f"optimizer's {k}" for k, v in state.items() if isinstance(v, Tensor) and is_bad(v)]
        return tuple(found)

    def truth(self, plant: Plant, *, detail: str = "auto") -> Truth:
        """The right answer, from the planted step run without any tool."""
        specimen, stands = self.specimen, plant.place == "buffer" and plant.kind != "nan"
        if plant.place in ("weight", "buffer") and plant.path not in self.readers:
            return Truth(excluded="never_read")
        with planted(specimen, plant) as reached, bad_gradients(specimen.model) as gradients:
            harm = self._harm(specimen.optimizer(), plant.path if stands else None)
            after = fingerprint(specimen.model)
        if plant.place in ("output", "gradient") and not reached.planted:
            return Truth(excluded="no_floating_output" if reached.calls else "not_called")
        if not harm:
            return Truth(after=after)
        if stands:
            return self._turn(plant, harm)
        if plant.place in ("weight", "buffer"):
            readers, names = self.readers[plant.path], self.aliases[plant.path]
            if len(names) == 1:  # of a tied parameter each reader is right: the first may read healthy rows only
                readers = readers[:1]
            return Truth(harm=harm, phase="state", modules=readers, kinds=(plant.kind,), tensors=names)
        if plant.place == "output":
            only_shown = plant.kind != "nan" and all(name.startswith("output") for name in harm)
            if detail == "module" and only_shown:
                return Truth(excluded="computed_or_literal", harm=harm)
            if detail != "op" and plant.kind == "-inf" and reached.graphless:
                return Truth(excluded="mask_like", harm=harm)
            return Truth(harm=harm, phase="forward", modules=(plant.path,), kinds=(plant.kind,))
        if detail == "op":
            return Truth(harm=harm, phase="backward", modules=(plant.path,), kinds=(plant.kind,))
        if getattr(specimen.model.get_submodule(plant.path), "inplace", False):
            return Truth(excluded="in_place", harm=harm)
        if self._shared_comes_first(plant):
            return Truth(excluded="shared_gradient", harm=harm)
        # At module level the kind is what the first boundary shows, e.g. both infinities behind a Linear.
        kinds = dict.fromkeys((plant.kind, *(seen.kinds[0] for seen in gradients[:1])))
        modules: dict[str | None, None] = {plant.path: None}
        shown = {seen.parameter for seen in gradients}
        # A gradient seen nowhere but in a tied parameter is a sum over its readers, and any of them may have sent it.
        if len(shown) == 1 and None not in shown:
            modules |= dict.fromkeys(self.readers.get(str(shown.pop()), ()))
        return Truth(harm=harm, phase="backward", modules=tuple(modules), kinds=tuple(kinds))

    def _shared_comes_first(self, plant: Plant) -> bool:
        """Whether the first bad gradient is one which the planted module alone did not make, or may not have made."""
        specimen = self.specimen
        with planted(specimen, plant, apart=True) as reached, bad_gradients(specimen.model) as gradients:
            specimen.step(specimen.optimizer())
        if bool(gradients) and gradients[0].key in reached.shared:
            return True
        readers: dict[object, set[str]] = {}
        with planted(specimen, plant) as reached, bad_gradients(specimen.model, readers) as gradients:
            specimen.step(specimen.optimizer())
        if not gradients or gradients[0].key is None:
            return False
        mine = readers.get(gradients[0].key, set())
        apart = [one for one in mine if not any(other != one and _holds(one, other) for other in mine)]
        return len(apart) > 1 or (bool(apart) and gradients[0].key in reached.given)

    def _turn(self, plant: Plant, harm: tuple[str, ...]) -> Truth:
        """The Inf of a buffer is intent; the birth is the operation that made a NaN of it."""
        specimen = self.specimen
        with planted(specimen, plant), running_modules(specimen.model) as running, _Turns(running) as turns:
            output, loss = specimen.step(specimen.optimizer())
            results = [*floating(output), loss, *floating(list(specimen.model.buffers()))]
            carried = any("nan" in kinds_in(tensor) for tensor in results)
        # Gradients alone can have gone bad by a second turn, in a derivative that read the infinity itself.
        forward = [module for phase, module in turns.found if phase == "forward"]
        if len(forward) != 1 or not carried:
            return Truth(excluded="standing_inf", harm=harm)
        return Truth(harm=harm, phase="forward", modules=(forward[0],), kinds=("nan",))
