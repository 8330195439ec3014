"""Anything a program leaves behind, as a flat table of facts and bytes that can be compared."""

import dataclasses
import re
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedTensorMixin

Table = dict[str, object]

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks")
PLAIN = (type(None), bool, int, str, bytes, complex, range, slice, torch.dtype, torch.device, torch.Size)


def freeze(value: object) -> Table:
    """Everything reachable from the value: tensors to the bit, modules with their hooks, plain objects."""
    table: Table = {}
    _walk(value, "", table, {})
    return table


def marks(model: torch.nn.Module) -> Table:
    """What a tool could have left on a model: attributes and hooks of each module and each parameter."""
    table: Table = {}
    for path, module in model.named_modules():
        table[f"{path}: attributes"] = tuple(sorted(vars(module)))
        table[f"{path}: forward"] = _name(module.forward)
        for name in HOOKS:
            table[f"{path}: {name}"] = _hook_names(getattr(module, name, None))
    for path, parameter in model.named_parameters():
        table[f"{path}: hooks"] = _leaf_hooks(parameter)
    for path, buffer in model.named_buffers():
        table[f"{path}: hooks"] = _leaf_hooks(buffer)
    return table


def _walk(value: object, path: str, table: Table, seen: dict[int, object]) -> None:
    if isinstance(value, PLAIN):
        table[path] = value
        return
    if isinstance(value, float | np.generic):
        table[path] = (type(value).__name__, np.asarray(value).tobytes())
        return
    if id(value) in seen:
        table[path] = "seen before"
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        _tensor(value, path, table, seen)
    elif isinstance(value, np.ndarray):
        table[path] = (str(value.dtype), value.shape, value.strides, value.tobytes())
    elif isinstance(value, torch.UntypedStorage | torch.TypedStorage):
        table[path] = ("storage", value.nbytes())
    elif isinstance(value, torch.nn.Module):
        _module(value, path, table, seen)
    elif isinstance(value, torch.optim.Optimizer):
        table[f"{path}.attributes"] = tuple(sorted(vars(value)))
        table[f"{path}.hooks"] = tuple(_hook_names(getattr(value, name, None)) for name in OPTIMIZER_HOOKS)
        table[f"{path}.step"] = _name(value.step)
        _walk(value.state_dict(), f"{path}.state", table, seen)
    elif isinstance(value, BaseException):
        notes = getattr(value, "__notes__", ())
        table[path] = (type(value).__name__, _text(value), tuple(notes), tuple(sorted(vars(value))))
    elif isinstance(value, Mapping):
        table[f"{path}()"] = (type(value).__name__, len(value))
        for key in value:
            _walk(value[key], f"{path}[{_text(key)}]", table, seen)
    elif isinstance(value, list | tuple | deque):
        table[f"{path}()"] = (type(value).__name__, len(value))
        for i, item in enumerate(value):
            _walk(item, f"{path}[{i}]", table, seen)
    elif isinstance(value, set | frozenset):
        table[path] = tuple(sorted(map(_text, value)))
    elif dataclasses.is_dataclass(value) or type(value).__module__.startswith(("situations", "tests", "__main__")):
        table[f"{path}()"] = type(value).__name__
        for key, item in sorted(getattr(value, "__dict__", {}).items()):
            _walk(item, f"{path}.{key}", table, seen)
    else:
        table[path] = (type(value).__name__, _text(value))


def _module(module: torch.nn.Module, path: str, table: Table, seen: dict[int, object]) -> None:
    table[f"{path}()"] = (type(module).__name__, _text(module))
    for name, fact in marks(module).items():
        table[f"{path}/{name}"] = fact
    for name, parameter in module.named_parameters():
        _walk(parameter, f"{path}.{name}", table, seen)
    for name, buffer in module.named_buffers():
        _walk(buffer, f"{path}.{name}", table, seen)
    for where, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, float | str | int | torch.Tensor | list | dict) and not name.startswith("_"):
                _walk(value, f"{path}.{where}.{name}", table, seen)


def _tensor(tensor: torch.Tensor, path: str, table: Table, seen: dict[int, object]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        facts: list[object] = [type(tensor).__name__, tensor.dtype, str(tensor.layout), str(tensor.device)]
        if isinstance(tensor, UninitializedTensorMixin):
            table[path] = tuple(facts)
            return
        strided = tensor.layout is torch.strided and not tensor.is_nested
        shape = tuple(map(str, tensor.shape)) if strided else str(tensor.dim())
        facts += [shape, tensor.stride() if strided else None, tensor.storage_offset() if strided else None]
        facts += [tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn).__name__]
        facts.append(tensor.is_inference())
        table[f"{path}:version"] = None if tensor.is_inference() else tensor._version
        facts += [tensor.is_conj(), tensor.is_neg() if strided else None, tensor.retains_grad]
        if tensor.is_leaf:
            facts.append(_leaf_hooks(tensor))
        table[path] = tuple(facts)
        table[f"{path}:bits"] = _bits(tensor)
        grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    if grad is not None:
        _walk(grad, f"{path}.grad", table, seen)


def _bits(tensor: torch.Tensor) -> object:
    tensor = tensor.detach()
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return None
    if hasattr(tensor, "_local_tensor"):
        return _bits(tensor._local_tensor)
    if tensor.is_nested:
        return tuple(_bits(part) for part in tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return _bits(tensor._indices()), _bits(tensor._values())
    if tensor.layout in COMPRESSED:
        return _bits(tensor.to_sparse_coo())
    if tensor.layout is not torch.strided:
        return _bits(tensor.to_dense())
    if tensor.is_quantized:
        return str(tensor.qscheme()), _bits(tensor.int_repr())
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    dense = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def _leaf_hooks(tensor: torch.Tensor) -> tuple[object, ...]:
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return (
        _hook_names(tensor._backward_hooks),
        _hook_names(after),
        tuple(sorted(name for name in getattr(tensor, "__dict__", ()) if not name.startswith("_dynamo"))),
    )


def _hook_names(hooks: object) -> tuple[str, ...]:
    return tuple(_name(hook) for hook in hooks.values()) if isinstance(hooks, Mapping) else ()


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _text(value: object) -> str:
    return re.sub(r"0x[0-9a-f]+|\d{5,}", "#", str(value)) if not isinstance(value, str) else value
