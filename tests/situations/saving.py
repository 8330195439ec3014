"""Copying, pickling, loading, parametrising and materialising a model while it is watched."""

import copy
import io
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from .harness import Spans
from .models import Net, batch, conv_net, mlp, situation, squared, step, train


def _again(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@situation()
def deepcopy_hooked(watch: Spans) -> object:
    """Deep copies made while watched carry no hook, and run in and after the watch."""
    model = Net()
    with watch(model):
        loss = squared(model(batch()))
        first = copy.deepcopy(model)
        loss.backward()
        second = copy.deepcopy(model)
        inside = squared(second(batch()))
        inside.backward()
        shallow = copy.copy(model.head)
    squared(first(batch())).backward()
    return [model, first, second, shallow, inside]


@situation()
def pickle_hooked(watch: Spans) -> object:
    """pickle and torch.save of the whole watched model, of its state, of an output; all load again."""
    model = Net()
    with watch(model):
        out = model(batch())
        blobs = [
            pickle.dumps(model),
            _saved(model),
            _saved(model.state_dict()),
            _saved({"out": out, "p": model.head.weight}),
        ]
        squared(out).backward()
        blobs.append(_saved([p.grad for p in model.parameters()]))
    return [model, pickle.loads(blobs[0]), *map(_again, blobs[1:])]


@situation()
def pickle_optimizer(watch: Spans) -> object:
    """The optimizer is copied, pickled and restored from its state while watched."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with watch(model, optimizer):
        for _ in range(2):
            squared(model(batch())).backward()
            optimizer.step()
        both = copy.deepcopy((model, optimizer))
        loaded = pickle.loads(pickle.dumps(optimizer))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        squared(model(batch())).backward()
        optimizer.step()
    return [model, optimizer, *both, loaded]


@situation()
def load_state_under_watch(watch: Spans) -> object:
    """load_state_dict by copy and by assign=True, which replaces the Parameters."""
    model, other = Net(), Net()
    with watch(model):
        squared(model(batch())).backward()
        model.load_state_dict(other.state_dict())
        squared(model(batch())).backward()
        model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=True)
        squared(model(batch())).backward()
    return [model, other]


@situation()
def parameters_replaced(watch: Spans) -> object:
    """Parameters and buffers are replaced, added and deleted while watched."""
    model = conv_net()
    with watch(model):
        squared(model(batch(2, 3, 14, 14))).backward()
        old = model[0].weight
        model[0].weight = nn.Parameter(torch.randn_like(old) * 0.1)
        model[0].bias = None
        model[1].running_mean = torch.ones(6)
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
        (squared(model(batch(2, 3, 14, 14))) * model.scale).backward()
    return [model, old]


@situation()
def parametrizations_(watch: Spans) -> object:
    """weight_norm, spectral_norm, orthogonal and a parametrisation of the user's; cached too."""

    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    layers = [nn.Linear(4, 4) for _ in range(4)]
    parametrizations.weight_norm(layers[0])
    parametrizations.spectral_norm(layers[1])
    parametrizations.orthogonal(layers[2])
    parametrize.register_parametrization(layers[3], "weight", Symmetric())
    model = nn.Sequential(*layers)
    with parametrize.cached():
        made = step(watch, model, batch())
    return [made["out"], train(watch, model, torch.optim.SGD(model.parameters(), 0.1)), model]


@situation()
def parametrized_under_watch(watch: Spans) -> object:
    """A parametrisation is added and removed while watched, which changes the module's class."""
    model = mlp(4, 4, 3)
    with watch(model):
        squared(model(batch())).backward()
        parametrizations.weight_norm(model[0])
        squared(model(batch())).backward()
        parametrize.remove_parametrizations(model[0], "weight")
        squared(model(batch())).backward()
    return model


@situation()
def old_weight_spectral_norm(watch: Spans) -> object:
    """The older weight_norm and spectral_norm, which are forward pre-hooks."""
    model = mlp(4, 4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])
        nn.utils.spectral_norm(model[2])
    return train(watch, model, torch.optim.SGD(model.parameters(), 0.1))


@situation()
def pruning(watch: Spans) -> object:
    """Pruning masks, added while watched and made permanent."""
    model = mlp(4, 6, 3)
    prune.l1_unstructured(model[0], "weight", 0.5)
    with watch(model):
        squared(model(batch())).backward()
        prune.random_unstructured(model[2], "weight", 3)
        squared(model(batch())).backward()
        prune.remove(model[0], "weight")
        squared(model(batch())).backward()
    return model


@situation()
def lazy_modules(watch: Spans) -> object:
    """Lazy layers get their shapes, and new classes, in the first watched call."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = step(watch, model, batch(2, 3, 6, 6))
    return [first, train_more(watch, model)]


def train_more(watch: Spans, model: nn.Module) -> object:
    """Two more steps of a convolution net."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    with watch(model):
        for _ in range(2):
            loss = squared(model(batch(2, 3, 6, 6)))
            loss.backward()
            optimizer.step()
            losses.append(loss)
    return losses


@situation()
def state_dict_hooks(watch: Spans) -> object:
    """The user's hooks on saving and loading see the same dictionaries."""
    model, log = Net(), []
    model.register_state_dict_post_hook(lambda m, d, *a: log.append(sorted(d)))
    model.register_load_state_dict_pre_hook(lambda m, d, *a: log.append(len(d)))
    with watch(model):
        model(batch())
        state = model.state_dict()
        model.load_state_dict(state)
        extra = [sorted(dict(m.named_children())) for m in model.modules()]
    return [model, state, log, extra]


@situation()
def model_dies_under_watch(watch: Spans) -> object:
    """Modules, outputs and gradients die when the program lets go of them, watched or not."""
    import gc
    import weakref

    model: Any = Net()
    holder = nn.Sequential(nn.Linear(4, 4), model)
    with watch(holder):
        out = holder(batch())
        squared(out).backward()
        refs = [weakref.ref(model.head), weakref.ref(out), weakref.ref(out.untyped_storage())]
        del out
        gc.collect()
        dead = [ref() is None for ref in refs[1:]]
        del holder[1], model
    gc.collect()
    return [holder, dead, refs[0]() is None]
