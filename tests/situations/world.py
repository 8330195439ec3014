"""What a program must find unchanged around it: torch's global hooks and functions, modes, limits, threads."""

import builtins
import copy
import gc
import os
import pickle
import random
import sys
import threading
import warnings

import numpy as np
import torch
import torch._dynamo  # its first import replaces functions of torch, whoever causes it
import torch.nn.modules.module as nn_module
import torch.optim.optimizer as optimizer
import torch.utils.checkpoint

World = dict[str, object]

GLOBAL_HOOKS = [
    (nn_module, n) for n in vars(nn_module) if n.startswith("_global") and n.endswith(("hooks", "called", "kwargs"))
]
GLOBAL_HOOKS += [(optimizer, n) for n in vars(optimizer) if n.startswith("_global_optimizer")]

CLASSES = (
    torch.nn.Module,
    torch.Tensor,
    torch._C.TensorBase,
    type(torch.autograd.Variable._execution_engine),
    torch.nn.Parameter,
    torch.optim.Optimizer,
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.LBFGS,
    torch.amp.GradScaler,
    torch.cuda.amp.GradScaler,
    torch.autograd.Function,
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.DataParallel,
    torch.utils.data.DataLoader,
    threading.Thread,
)
MODULES = (
    "torch",
    "torch._C",
    "torch._tensor",
    "torch.amp",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.grad_mode",
    "torch.autograd.graph",
    "torch.autograd.variable",
    "torch.amp.grad_scaler",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.func",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim.optimizer",
    "torch.optim.swa_utils",
    "torch.optim.lr_scheduler",
    "torch.serialization",
    "torch.utils.checkpoint",
    "torch.utils.hooks",
    "torch.utils.data",
)


def world() -> World:
    """Every fact of the process that a tool could have changed and forgotten."""
    state: World = {}
    for module, name in GLOBAL_HOOKS:
        state[f"hooks {name}"] = tuple(getattr(module, name).items())
    for cls in CLASSES:
        for name, value in vars(cls).items():
            state[f"{cls.__module__}.{cls.__qualname__}.{name}"] = value
    for space in (*(sys.modules.get(name) for name in MODULES), builtins, random, np.random, copy, pickle, threading):
        for name, value in vars(space).items() if space is not None else ():
            state[f"function {getattr(space, '__name__', '')}.{name}"] = value if callable(value) else None
    state["modes"] = (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack())
    state["grad"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    state["autocast"] = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    state["defaults"] = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )
    state["early stop"] = torch.utils.checkpoint._enable_checkpoint_early_stop
    saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    state["saved tensor hooks"] = saved_hooks is None or saved_hooks(True) is None
    state["recursion limit"] = sys.getrecursionlimit()
    state["interpreter"] = (
        sys.excepthook,
        threading.excepthook,
        sys.gettrace(),
        sys.getprofile(),
        sys.displayhook,
        sys.unraisablehook,
    )
    state["gc"] = (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks))
    state["warnings"] = (tuple(warnings.filters), warnings.showwarning, warnings.formatwarning)
    names = (t.name for t in threading.enumerate())
    state["threads"] = tuple(sorted(n for n in names if not n.startswith(("QueueFeeder", "ThreadPoolExecutor"))))
    state["environment"] = dict(os.environ)
    state["directory"] = os.getcwd()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    state["compile stance"] = str(getattr(dynamo, "_stance", None))
    return state


def changes(before: World, after: World) -> list[str]:
    """Facts that differ; names that a late import added to a module are no change."""
    found = []
    for key in before.keys() | after.keys():
        if key not in before:
            if not key.startswith("function "):
                found.append(f"added: {key}")
        elif key not in after:
            found.append(f"gone: {key}")
        elif before[key] is not after[key] and (callable(before[key]) or before[key] != after[key]):
            found.append(f"changed: {key}: {_difference(before[key], after[key])}")
    return sorted(found)


def _difference(old: object, new: object) -> str:
    if isinstance(old, tuple) and isinstance(new, tuple):
        gone, come = [x for x in old if x not in new], [x for x in new if x not in old]
        return f"gone {_short(gone)}, come {_short(come)}"
    return f"{_short(old)} -> {_short(new)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."
