"""Modules of torch.nn to their type and configuration, and back: by a list of types, never by a name to import."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UsageError

Tensor = torch.Tensor
Spec = dict[str, Any]  # {"type": "Linear", "config": {...}} and, of a Sequential, "children"

# Each is a class of torch.nn whose constructor takes numbers, words and flags, and whose forward runs code of torch's
# alone. Not in it: what sizes its work by the numbers it is given (CTCLoss), or trusts indices (MaxUnpool).
TYPES = frozenset(
    """
    Identity Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding
    BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm GroupNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm
    RMSNorm LocalResponseNorm
    CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6
    SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold
    Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout
    AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d LPPool1d LPPool2d LPPool3d
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
    RNN LSTM GRU RNNCell LSTMCell GRUCell MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer
    CosineSimilarity PairwiseDistance Flatten Unflatten PixelShuffle PixelUnshuffle Upsample
    ZeroPad1d ZeroPad2d ZeroPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d
    ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d
    L1Loss MSELoss SmoothL1Loss HuberLoss CrossEntropyLoss NLLLoss KLDivLoss BCELoss BCEWithLogitsLoss PoissonNLLLoss
    GaussianNLLLoss SoftMarginLoss MarginRankingLoss HingeEmbeddingLoss CosineEmbeddingLoss TripletMarginLoss
    """.split()
)
_MOST_LAYERS, _MOST_CHILDREN = 256, 256
_LARGEST = 1 << 40
# Of these the constructor takes no list of names that could be read.
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
_NAMES = {
    "RNN": (*_RECURRENT, "nonlinearity"),
    "GRU": _RECURRENT,
    "LSTM": (*_RECURRENT, "proj_size"),
}
# Where a module keeps an argument under another name, or derives something from it.
_ELSEWHERE: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("MultiheadAttention", "bias"): lambda m: m.in_proj_bias is not None,
    ("MultiheadAttention", "add_bias_kv"): lambda m: m.bias_k is not None,
    ("PairwiseDistance", "p"): lambda m: m.norm,
    ("RNN", "nonlinearity"): lambda m: m.nonlinearity,
}
_LAYER: dict[str, Callable[[Any], Any]] = {
    "d_model": lambda m: m.self_attn.embed_dim,
    "nhead": lambda m: m.self_attn.num_heads,
    "dim_feedforward": lambda m: m.linear1.out_features,
    "dropout": lambda m: m.dropout.p,
    "activation": lambda m: {nn.functional.relu: "relu", nn.functional.gelu: "gelu"}[m.activation],
    "layer_norm_eps": lambda m: m.norm1.eps,
    "batch_first": lambda m: m.self_attn.batch_first,
    "norm_first": lambda m: m.norm_first,
    "bias": lambda m: m.linear1.bias is not None,
}
_ELSEWHERE |= {
    (f"Transformer{which}Layer", name): get for which in ("Encoder", "Decoder") for name, get in _LAYER.items()
}
# Tensors come with the state; how losses were once told to reduce is told by `reduction`.
_NOT_TOLD = frozenset(
    "self device dtype size_average reduce weight pos_weight min_value max_value process_group".split()
)


def described(module: nn.Module) -> Spec | None:
    """The type and configuration of a module; None for one that cannot be made from these alone."""
    try:
        spec = _described(module)
        if spec is None:
            return None
        made = _made(spec)
    except Exception:  # an attribute was taken off, or put to a use of its own
        return None
    mine, theirs = [[(name, type(m)) for name, m in one.named_modules()] for one in (module, made)]
    return spec if mine == theirs and _shapes(module).items() >= _shapes(made).items() else None


def _described(module: nn.Module) -> Spec | None:
    name = type(module).__name__
    if "forward" in vars(module) or any(m._forward_hooks or m._forward_pre_hooks for m in module.modules()):
        return None
    if type(module) is nn.Sequential:
        children = [[key, _described(child)] for key, child in module._modules.items() if child is not None]
        whole = all(spec is not None for _, spec in children) and len(children) <= _MOST_CHILDREN
        return {"type": "Sequential", "config": {}, "children": children} if whole else None
    if name not in TYPES or type(module) is not getattr(nn, name):
        return None
    return {"type": name, "config": {key: _read(module, name, key) for key in _arguments(name)}}


def _arguments(name: str) -> list[str]:
    if name in _NAMES:
        return list(_NAMES[name])
    told = inspect.signature(getattr(nn, name).__init__).parameters
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [k for k, one in told.items() if k not in _NOT_TOLD and not k.startswith("_") and one.kind not in stars]


def _read(module: nn.Module, name: str, key: str) -> Any:
    elsewhere = _ELSEWHERE.get((name, key))
    if elsewhere is not None:
        return elsewhere(module)
    value = getattr(module, key)
    return value is not None if key in module._parameters else value


def built(spec: Any, state: Mapping[str, Tensor]) -> nn.Module:
    """The module of a description, which may come from anybody, with the parameters and buffers of `state`.

    It is made without memory of its own; what it holds afterwards is the state.

    Raises:
        UsageError: for a type that is not on the list, a configuration that is none, or a state that does not fit.
    """
    try:
        module = _made(spec)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the module cannot be built from its configuration: {_first(error)}") from None
    fit(module, state, whole=True)
    return module


def fit(module: nn.Module, state: Mapping[str, Tensor], *, whole: bool = False) -> list[str]:
    """Give a module the parameters and buffers of `state`; the names that it has and the state has not.

    Raises:
        UsageError: for shapes that differ, and for a module of torch.nn whose own parameters are of several dtypes;
            with `whole`, for names that differ, too.
    """
    wanted = _shapes(module)
    for name, shape in wanted.items():
        if name in state and tuple(state[name].shape) != shape:
            raise UsageError(f"{name} is {list(shape)} in the model, and {list(state[name].shape)} in the capsule")
    missing = [name for name in wanted if name not in state]
    if whole and missing:
        raise UsageError(f"the capsule does not hold {', '.join(missing[:5])}")
    for name, value in state.items():
        where, _, short = name.rpartition(".")
        try:
            owner = module.get_submodule(where)
        except AttributeError:
            continue
        if short in owner._parameters:
            # Through the module, which may keep a second list of its weights (LSTM).
            setattr(
                owner, short, value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
            )
        elif short in owner._buffers:
            owner._buffers[short] = value
    for one in module.modules():
        dtypes = {p.dtype for p in one.parameters(recurse=False)}
        if len(dtypes) > 1 and type(one) is getattr(nn, type(one).__name__, None):
            # The fast path of MultiheadAttention takes it on trust, and reads beyond the end.
            raise UsageError(f"the parameters of a {type(one).__name__} are of several dtypes")
    return missing


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tuple(t.shape) for name, t in named}


def _made(spec: Any) -> nn.Module:
    kind = spec.get("type") if isinstance(spec, dict) else None
    if kind == "Sequential":
        children = spec["children"]
        if len(children) > _MOST_CHILDREN:
            raise UsageError(f"a Sequential of {len(children)} modules is not rebuilt")
        made = nn.Sequential()
        for name, child in children:
            made.add_module(_word(name), _made(child))
        return made
    if not isinstance(kind, str) or kind not in TYPES:
        raise UsageError(f"{kind!r} is no module that is rebuilt from a capsule: give its model with --model")
    legal, config = _arguments(kind), spec["config"]
    wrong = [key for key in config if key not in legal]
    if wrong:
        raise UsageError(f"{kind} takes no {wrong[0]!r}")
    for value in config.values():
        _plain(value)
    if config.get("num_layers", 1) > _MOST_LAYERS:
        raise UsageError(f"{kind} of {config['num_layers']} layers is not rebuilt")
    with torch.device("meta"):
        module: nn.Module = getattr(nn, kind)(**config)
    return module


def _word(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 100:
        raise UsageError("a word of the configuration is none")
    return value


def _plain(value: Any, depth: int = 0) -> None:
    if isinstance(value, str):
        _word(value)
    elif isinstance(value, (list, tuple)) and depth < 3 and len(value) <= 64:
        for one in value:
            _plain(one, depth + 1)
    elif not (value is None or isinstance(value, (bool, float)) or (type(value) is int and abs(value) < _LARGEST)):
        raise UsageError("a value of the configuration is none that a module takes")


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]
