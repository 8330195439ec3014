"""Modules to the path a user knows: DDP, FSDP, compile and checkpoint wrappers leave no trace in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

# What a wrapper calls the module it wraps. These names never stand in the user's own model.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_MODULE_WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "DDP",
    "DeepSpeedEngine",
}
_MAX_ALIASES = 16


def _transparent(module: nn.Module, name: str) -> bool:
    return name in _WRAPPED or (name == "module" and any(c.__name__ in _MODULE_WRAPPERS for c in type(module).__mro__))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every (path, module) as the user knows it; a shared module comes once for each of its names."""
    todo: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    times: dict[int, int] = {}
    while todo:
        path, module, above = todo.pop()
        times[id(module)] = times.get(id(module), 0) + 1
        if times[id(module)] > _MAX_ALIASES:
            continue
        yield path, module
        above = above | {id(module)}
        for name, child in reversed(list(module._modules.items())):
            if child is None or id(child) in above:
                continue
            inner = path if _transparent(module, name) else f"{path}.{name}" if path else name
            todo.append((inner, child, above))


def type_name(module: nn.Module) -> str:
    """The class a user would write: `Linear`, not FSDP's or parametrize's made-up subclass."""
    cls = type(module)
    for prefix in ("FSDP", "Parametrized"):
        if cls.__name__.startswith(prefix) and len(cls.__mro__) > 1 and cls.__name__ != prefix:
            base = cls.__mro__[1]
            if base.__name__ == cls.__name__[len(prefix) :]:
                return base.__name__
    for base in cls.__mro__:  # fully_shard swaps in a class that mixes FSDPModule with the user's
        if base.__name__ == "FSDPModule" and len(cls.__mro__) > 2:
            return cls.__mro__[2].__name__
    return cls.__name__


class Names:
    """Paths of modules, parameters and buffers of one model, looked up by identity.

    `modules` maps `id(module)` to its aliases, `owners` maps `id(parameter)` to `(name, owner path)`
    pairs. The model is held, so the identities stay true; `refresh` takes in what was added since.
    """

    def __init__(self, model: nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> None:
        self.model: nn.Module = model
        self.wanted = wanted  # which modules are looked at, by path
        self.modules: dict[int, list[str]] = {}
        self.by_path: dict[str, nn.Module] = {}
        self.owners: dict[int, list[tuple[str, str]]] = {}
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Read the tree again; True when a module that was not known has appeared."""
        before = len(self.modules)
        known = set(self.modules)
        self.modules, self.owners, self.by_path, self.buffers = {}, {}, {}, {}
        self._parameters: list[tuple[str, str, dict[str, nn.Parameter | None], str]] = []
        for path, module in walk(self.model):
            self.modules.setdefault(id(module), []).append(path)
            self.by_path[path] = module  # of a wrapper and what it wraps, the inner one
            prefix = path + "." if path else ""
            looked = self.wanted(path)
            parameters = module._parameters
            if not isinstance(parameters, dict):  # a ScriptModule's
                parameters = dict(parameters.items())
            for name, p in parameters.items():
                if looked:
                    self._parameters.append((prefix + name, path, parameters, name))
                if p is not None:
                    pairs = self.owners.setdefault(id(p), [])
                    if (prefix + name, path) not in pairs:
                        pairs.append((prefix + name, path))
            for name, b in module._buffers.items():
                if b is not None and looked:
                    self.buffers[prefix + name] = (module, name)
        return len(self.modules) != before or set(self.modules) != known

    def parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """(name, path of the module that owns it, parameter) of the modules that are looked at, as they stand now."""
        for name, path, parameters, short in self._parameters:
            p = parameters.get(short)
            if p is not None:
                yield name, path, p

    def forget(self) -> None:
        """Let the model go."""
        self.model = nn.Module()
        self.refresh()
