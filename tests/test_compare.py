"""`nanhunt.compare`: two runs of one step, where they part, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import nanhunt
from nanhunt.cli import main
from nanhunt.precision.figures import LINE, Call, Figures
from nanhunt.precision.likeness import Likeness
from nanhunt.precision.settings import parse

transformers = pytest.importorskip("transformers")

VOCABULARY = 99


# --- models, and what is planted in them ---------------------------------------------------------------------


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=5,
    )
    return transformers.BertForSequenceClassification(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": _bert, "llama": _llama, "t5": _t5, "resnet": _resnet}


def _batch(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (4, 16), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    if name == "bert":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 3])}
    if name == "llama":
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if name == "t5":
        return {"input_ids": ids, "labels": torch.randint(1, VOCABULARY, (4, 9), generator=generator)}
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1, 2, 3])}


def _made(name: str, *, train: bool = True) -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]().train(train), _batch(name)
    return model, lambda: model(**batch).loss.backward()


def _quietly(model: nn.Module, name: str) -> Callable[[], None]:
    batch = _batch(name)

    def step() -> None:
        with torch.no_grad():
            model(**batch)

    return step


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    def one(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        return t.to(dtype) if dtype is not None else t.to(torch.bfloat16).to(t.dtype)

    return pytree.tree_map_only(torch.Tensor, one, value)


def _in_bfloat16(module: nn.Module) -> None:
    """All of a module's own code, its weights too, in bfloat16, and nothing to see of it outside."""
    forward = module.forward

    def secret(*args: Any, **kwargs: Any) -> Any:
        given = next((t for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.is_floating_point()), 0)
        weights = [(p, p.data) for p in module.parameters()]
        try:
            for p, data in weights:
                p.data = data.bfloat16()
            out = forward(*_cast(args, torch.bfloat16), **_cast(kwargs, torch.bfloat16))
        finally:
            for p, data in weights:
                p.data = data
        return _cast(out, given.dtype if torch.is_tensor(given) else torch.float32)

    module.forward = secret  # type: ignore[method-assign]


def _rounded(module: nn.Module) -> None:
    """One rounding to bfloat16 at the end of a module's own code, whatever stands in it."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: _cast(forward(*args, **kwargs), None)  # type: ignore[method-assign]


def _summed_in_half(module: nn.Module) -> None:
    """A Linear that adds up in float16, one product after the other."""
    weight, bias = module.weight, module.bias

    def secret(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float16)
        for i in range(x.shape[-1]):
            total = total + x[..., i : i + 1].half() * weight[:, i].half()
        return total.to(x.dtype) + (0 if bias is None else bias.to(x.dtype))

    module.forward = secret  # type: ignore[method-assign, assignment]


def _without_upcast(module: nn.Module) -> None:
    """A norm whose mean square is taken in float16."""

    def secret(x: torch.Tensor) -> torch.Tensor:
        h = x.half()
        if isinstance(module, nn.LayerNorm):
            h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-4) * module.weight.half()
        return (h + module.bias.half() if isinstance(module, nn.LayerNorm) else h).to(x.dtype)

    module.forward = secret  # type: ignore[method-assign]


def _one_of_each_kind(name: str) -> list[str]:
    model, _ = _made(name, train=False)
    seen = nanhunt.compare(model, _quietly(model, name), b="as_is", own=False).modules
    return list({one.type: path for path, one in seen.items()}.values())


class Net(nn.Module):
    """Dropout, a norm that counts, a layer that is called twice, and functional code between its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.shared = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.3)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        x = self.act(self.shared(self.drop(x)))
        x = self.shared(x) * torch.softmax(x, -1)
        return self.head(x)


def _net() -> tuple[Net, Callable[[], Any]]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 16)
    return model, lambda: model(x).square().mean().backward()


# --- where they part -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("b", ["autocast:float16", "autocast:bfloat16", "float16", "bfloat16"])
def test_ordinary_rounding_makes_no_module_part(name: str, b: str) -> None:
    model, step = _made(name)
    found = nanhunt.compare(model, step, b=b)
    assert found.first is None and found.died is None, str(found)
    assert LINE < found.output_cosine < 1


@pytest.mark.parametrize("name", MODELS)
def test_float32_against_float64_is_rounding_too(name: str) -> None:
    model, step = _made(name)
    found = nanhunt.compare(model, step, a="float64", b="float32")
    assert found.first is None and found.agree, str(found)
    assert 0 < 1 - found.output_cosine < 1e-9  # dropout has drawn the same masks, for all that the dtypes differ


@pytest.mark.parametrize("name", MODELS)
def test_a_module_of_any_kind_that_rounds_to_bfloat16_in_secret_is_named(name: str) -> None:
    """Also amid float16, which rounds an eighth as much; each kind of module is met under one setting."""
    paths, missed = _one_of_each_kind(name), []
    assert len(paths) > 8
    for path, b in zip(paths, itertools.cycle(["as_is", "float16", "autocast:float16", "a second model"])):
        model, _ = _made(name, train=False)
        planted = copy.deepcopy(model) if b == "a second model" else model
        _rounded(planted.get_submodule(path))
        found = nanhunt.compare(model, _quietly(model, name), b=planted if b == "a second model" else b)
        if found.first != path:
            missed.append((path, b, found.first))
    assert missed == []


@pytest.mark.parametrize(
    ("name", "path", "plant"),
    [
        ("bert", "bert.encoder.layer.1.attention.self.key", _in_bfloat16),
        ("bert", "bert.encoder.layer.0.output.LayerNorm", _in_bfloat16),
        ("llama", "model.layers.1.self_attn.o_proj", _in_bfloat16),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.v", _in_bfloat16),
        ("resnet", "resnet.encoder.stages.1.layers.0.layer.0.convolution", _in_bfloat16),
        ("bert", "bert.pooler.dense", _summed_in_half),
        ("llama", "model.layers.0.mlp.down_proj", _summed_in_half),
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wo", _summed_in_half),
        ("resnet", "classifier.1", _summed_in_half),
        ("bert", "bert.embeddings.LayerNorm", _without_upcast),
        ("llama", "model.norm", _without_upcast),
        ("t5", "decoder.block.0.layer.2.layer_norm", _without_upcast),
    ],
)
def test_a_planted_fault_is_named_when_the_rest_is_float32(name: str, path: str, plant: Callable[..., None]) -> None:
    model, _ = _made(name, train=False)
    plant(model.get_submodule(path))
    found = nanhunt.compare(model, _quietly(model, name), b="as_is")
    assert found.parted == (path,), str(found)
    assert path in found.title() and not found.agree


def test_secret_bfloat16_is_told_from_float16_around_it() -> None:
    """Eight times as much rounding: not to be seen in the output's cosine."""
    model, _ = _made("llama", train=False)
    _in_bfloat16(model.get_submodule("model.layers.0.mlp.up_proj"))
    found = nanhunt.compare(model, _quietly(model, "llama"), b="float16")
    assert found.first == "model.layers.0.mlp.up_proj" and found.output_cosine > 0.9999


class Attention(nn.Module):
    """The fault stands in its own forward, between its children."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half_softmax = half
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        shares = scores.bfloat16().softmax(-1).to(v.dtype) if self.half_softmax else scores.softmax(-1)
        return self.out(shares @ v)


@pytest.mark.parametrize("half", [False, True])
def test_a_fault_between_the_children_is_that_of_the_parent(half: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention(half), nn.Linear(32, 8))
    x = torch.randn(4, 10, 32)
    found = nanhunt.compare(model, lambda: model(x), b="as_is")
    assert found.parted == (("1",) if half else ())
    if half:
        own = found.modules["1"].own
        assert own is not None and own.tensor == "input input of 1.out"


def test_what_is_inherited_is_not_held_against_a_module() -> None:
    """Behind the fault everything is off, and only the fault is named; its error is told from what it was handed."""
    model, _ = _made("bert", train=False)
    _rounded(model.get_submodule("bert.encoder.layer.0.intermediate.dense"))
    found = nanhunt.compare(model, _quietly(model, "bert"), b="as_is")
    later = found.modules["bert.encoder.layer.1.output.dense"]
    assert later.output is not None and later.output.error > 1e-5
    assert later.own is not None and later.own.error < 1e-6
    assert found.parted == ("bert.encoder.layer.0.intermediate.dense",)


def test_a_number_that_overflows_in_one_run_is_named_and_spoils_nothing() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1e5).sqrt() / 300

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), Large(), nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    found = nanhunt.compare(model, lambda: model(x), b="float16")
    assert found.first == "2" and found.not_finite == "2" and found.parted == ("2",)
    assert "+inf" in found.title()
    for path in ("0", "1", "3", "4"):
        own = found.modules[path].own
        assert own is not None and not own.made and own.times < 2, path
    assert found.modules["2"].output is not None and found.modules["2"].output.only_b
    json.loads(found.to_json())


def test_masks_at_the_limits_of_their_formats_are_no_error() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask, torch.finfo(x.dtype).min)

    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masked, self.linear = Masked(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(8, dtype=torch.bool)
            mask[3:] = True
            return self.masked(self.linear(x), mask=mask).softmax(-1)

    torch.manual_seed(0)
    model, x = Soft(), torch.randn(64, 8)
    found = nanhunt.compare(model, lambda: model(x), b="float16")
    assert found.first is None and found.not_finite is None and found.agree, str(found)


# --- that the runs are the same ------------------------------------------------------------------------------


def test_the_same_setting_twice_is_the_same_bit_for_bit() -> None:
    model, step = _net()
    found = nanhunt.compare(model, step, a="float16", b="float16")
    assert found.identical and found.agree and found.output_cosine == 1.0 and found.gradient_cosine == 1.0
    assert all(one.cosine == 1.0 for one in found.modules.values())
    assert "precision is not the cause" in found.title()


def test_dropout_draws_the_same_masks_in_every_dtype() -> None:
    model, step = _net()
    found = nanhunt.compare(model, step, a="float64", b="float32")
    dropped = found.modules["drop"].output
    assert dropped is not None and dropped.error < 1e-6
    assert found.agree and not found.notes


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    numbers = [t.clone() for t in (*model.parameters(), *model.buffers())]
    moments = [v.clone() for p in model.parameters() for v in optimizer.state[p].values()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    draws = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(np.random.get_state()[1])]
    return [*numbers, *moments, *grads, *draws, model.training, *vars(model)]


@pytest.mark.parametrize("b", ["float16", "autocast:bfloat16", "float64", "as_is"])
def test_everything_is_afterwards_as_it_was(b: str) -> None:
    model, backward = _net()
    optimizer = torch.optim.Adam(model.parameters())
    objects: list[Any] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        random.random(), np.random.rand()
        backward()
        optimizer.step()

    step()
    backward()  # gradients stand, and add up
    before, grads = _state(model, optimizer), [p.grad for p in model.parameters()]
    objects += [id(p) for p in model.parameters()]
    keys = {name: set(vars(module)) for name, module in model.named_modules()}
    nanhunt.compare(model, step, b=b, optimizer=optimizer)
    after = _state(model, optimizer)
    for was, now in zip(before, after, strict=True):
        assert (torch.equal(was, now) and was.dtype is now.dtype) if torch.is_tensor(was) else was == now
    assert [p.grad for p in model.parameters()] == grads or all(
        p.grad is grad for p, grad in zip(model.parameters(), grads)
    )
    assert [id(p) for p in model.parameters()] == objects
    assert {name: set(vars(module)) for name, module in model.named_modules()} == keys
    assert not torch.is_autocast_enabled("cpu") and not torch.nn.modules.module._global_forward_hooks


def test_the_step_ends_where_its_optimizer_would_write() -> None:
    model, backward = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after: list[int] = []

    def step() -> None:
        backward()
        optimizer.step()
        after.append(1)

    found = nanhunt.compare(model, step, b="bfloat16")
    assert not after and found.died is None and found.gradient_cosine > LINE


def test_a_step_that_fails_in_the_first_run_says_so_and_leaves_nothing() -> None:
    model, _ = _net()
    state = copy.deepcopy(model.state_dict())

    def step() -> None:
        model(torch.ones(4, 16))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nanhunt.compare(model, step)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert "forward" not in vars(model)


def test_what_the_second_run_dies_of_is_told_with_what_came_before() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float16:
                raise NotImplementedError("no kernel for Half")
            return x

    model = nn.Sequential(nn.Linear(4, 4), Picky(), nn.Linear(4, 4))
    found = nanhunt.compare(model, lambda: model(torch.ones(2, 4)), b="float16")
    assert found.died == "NotImplementedError: no kernel for Half" and not found.agree
    assert "no kernel for Half" in found.title() and found.modules["0"].cosine > LINE


def test_a_step_that_draws_its_own_data_is_found_out() -> None:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    batches = iter([torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6]), torch.tensor([7, 8])])
    with pytest.raises(nanhunt.UsageError, match=r"draws its own data.*batches=\[batch\]"):
        nanhunt.compare(model, lambda: model(next(batches)), b="bfloat16")


@pytest.mark.parametrize("shapes", [((2, 8), (2, 8)), ((2, 8), (3, 8))], ids=["numbers", "shapes"])
def test_another_batch_of_floating_point_numbers_is_found_out_too(shapes: tuple[tuple[int, int], ...]) -> None:
    model = nn.Linear(8, 8)
    batches = itertools.cycle([torch.randn(shape) for shape in shapes])
    with pytest.raises(nanhunt.UsageError, match="draws its own data"):
        nanhunt.compare(model, lambda: model(next(batches)), b="bfloat16")
    same = nanhunt.compare(model, lambda: model(torch.randn(2, 8)), b="bfloat16")  # random numbers are put back
    assert same.agree


def test_tokens_that_a_model_chooses_otherwise_are_told_as_that() -> None:
    """1 + 2 ** -9 is 1 in bfloat16, so another token is the first of the largest."""
    model = nn.Embedding.from_pretrained(torch.tensor([[1.0, 1 + 2.0**-9], [1.0, 2.0]]))

    def step() -> None:
        model(model(torch.tensor([0])).argmax(-1))

    found = nanhunt.compare(model, step, b="bfloat16")
    assert found.first is None and not found.agree
    assert any("other whole numbers" in note for note in found.notes)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_with_a_grad_scaler_can_be_compared_in_pure_float16(clips: bool) -> None:
    """GradScaler refuses gradients of float16 weights: a run ends before it looks at them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    x = torch.randn(4, 8)

    def step() -> None:
        scaler.scale(model(x).float().square().mean()).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    found = nanhunt.compare(model, step, b="float16")
    assert found.died is None and found.agree and found.gradient_cosine > LINE


def test_gradients_that_only_the_loss_scale_makes_infinite_are_told_as_that() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23)
    x = torch.ones(4, 8)
    found = nanhunt.compare(model, lambda: scaler.scale(model(x).float().sum()).backward(), b="float16")
    assert found.first is None and not found.agree and len(found.broken) == 4
    assert "gradients of 4 parameters are not finite in float16 alone, at a loss scale of 8 388 608" in found.title()
    assert "smaller init_scale" in " ".join(str(found).split()) and "below 0.99" not in found.title()


def test_lazy_modules_are_refused_and_still_can_be_made() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(nanhunt.UsageError, match=r"0.weight, 0.bias, 1.weight, ... are lazy.*call the model once"):
        nanhunt.compare(model, lambda: model(torch.ones(4, 8)))
    assert model(torch.randn(4, 8)).shape == (4, 3)


def test_a_model_without_numbers_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(nanhunt.UsageError, match="meta device"):
        nanhunt.compare(model, lambda: model(torch.empty(1, 2, device="meta")))


def test_a_model_that_nobody_can_look_into_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 1)), torch.ones(4, 8)

    def step() -> None:
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))

    with pytest.raises(nanhunt.UsageError, match=r"inside of torch\.func transforms"):
        nanhunt.compare(model, step)
    with pytest.raises(nanhunt.UsageError, match=r"has not called the model.*torch\.func transforms"):
        nanhunt.profile(model, step)
    scripted = torch.jit.script(model)
    with pytest.raises(nanhunt.UsageError, match="is a ScriptModule"):
        nanhunt.compare(scripted, lambda: scripted(x))


class _Eighth(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)


class _EighthProduct(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.tensor(1.0)
        weight = (torch.eye(32) * 0.3).to(torch.float8_e4m3fn)
        made = torch._scaled_mm(x.to(torch.float8_e4m3fn), weight.t(), one, 2 * one, out_dtype=torch.bfloat16)
        return made.to(x.dtype)


@pytest.mark.parametrize("module", [_Eighth(), _EighthProduct()], ids=["cast", "product"])
@pytest.mark.parametrize("b", ["bfloat16", "as_is"])
def test_a_secret_float8_is_left_out_of_the_reference_and_named(module: nn.Module, b: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), module, nn.Linear(32, 4))
    x = torch.randn(16, 32)
    assert nanhunt.compare(model, lambda: model(x), b=b).first == "1"


def test_the_fused_encoder_of_torch_is_compared_and_audited_under_autocast() -> None:
    """Under a mode its one op loses autocast (torch 2.13), so it runs op by op meanwhile."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        found = nanhunt.compare(model, lambda: model(x), b="autocast:bfloat16")
        assert found.died is None and found.agree and "layers.0.linear1" in found.modules
        assert nanhunt.audit(model, example=x, autocast="bfloat16") == []
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_control_c_in_any_of_the_runs_leaves_nothing_behind(run: int) -> None:
    class Stops(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == run:
                raise KeyboardInterrupt
            return super().forward(x)

    calls: list[int] = []
    model = nn.Sequential(nn.Linear(8, 8), Stops(8, 8), nn.Linear(8, 2))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        nanhunt.compare(model, lambda: model(torch.ones(4, 8)).sum().backward(), b="bfloat16")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert not torch.nn.modules.module._global_forward_hooks and not torch.is_autocast_enabled("cpu")
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_the_whole_claim_is_not_made_for_gradients() -> None:
    """Of forward, rounding is measured; of gradients there is a cosine alone."""
    model, step = _net()
    found = nanhunt.compare(model, step, b="bfloat16")
    assert found.agree and "and the gradients have a cosine of" in found.title()


# --- gradients -----------------------------------------------------------------------------------------------


def test_gradients_are_compared_by_parameter_and_by_module() -> None:
    model, step = _net()
    found = nanhunt.compare(model, step, b="bfloat16")
    assert set(found.gradients) == {name for name, _ in model.named_parameters()}
    assert LINE < found.gradient_cosine < 1
    assert LINE < found.modules["shared"].gradient_cosine < 1 and len(found.modules["shared"].calls) == 2


class Lossy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.where(torch.arange(grad.shape[-1]) % 2 == 0, grad, 0 * grad) if Lossy.on else grad

    on = False


def test_gradients_that_part_where_forward_does_not_are_told() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Lossy.on = x.dtype is torch.bfloat16
            return Lossy.apply(x)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Odd(), nn.Linear(16, 4)), torch.randn(32, 16)
    found = nanhunt.compare(model, lambda: model(x).square().mean().backward(), b="bfloat16")
    assert found.first is None and found.output_cosine > LINE and found.gradient_cosine < 0.95
    assert not found.agree and "gradient" in found.title()


def test_the_loss_scale_is_taken_out() -> None:
    """A scaler that only the half run uses makes gradients 1024 times as large, not another direction or size."""
    model, _ = _net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(32, 16)

    def step() -> None:
        loss = model(x).float().square().mean()
        half = model.head.weight.dtype is torch.float16
        (scaler.scale(loss) if half else loss).backward()

    found = nanhunt.compare(model, step, b="float16", scaler=scaler)
    figures = found.gradients["head.weight"]
    assert 0.98 < figures.sizes[1] / figures.sizes[0] < 1.02
    assert found.context["loss scale b"] == 1024.0 and scaler.get_scale() == 1024.0


# --- what modules hand around --------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    best: torch.Tensor
    extra: tuple[torch.Tensor, int, None]


def test_outputs_of_every_form_are_compared() -> None:
    class Forms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor, *, scale: dict[str, torch.Tensor]) -> Answer:
            y, (h, c) = self.two(self.one(x))
            return Answer(logits=y * scale["by"], best=y.argmax(-1), extra=(h + c, 3, None))

    torch.manual_seed(0)
    model, x = Forms(), torch.randn(5, 3, 8)
    found = nanhunt.compare(model, lambda: model(x, scale={"by": torch.tensor(2.0)}), b="bfloat16")
    assert found.outputs[0].tensor == "output.logits" and LINE < found.output_cosine < 1
    assert set(found.modules) == {"", "one", "two"} and found.first is None
    given = found.modules[""].calls[0].input
    assert given is not None and given.tensor in ("input x", "input scale['by']")


def test_a_shared_module_has_a_row_for_each_call() -> None:
    model, step = _net()
    found = nanhunt.compare(model, step, b="bfloat16")
    assert [call.call for call in found.modules["shared"].calls] == [1, 2]


def test_checkpointing_and_inference_mode_are_no_obstacle() -> None:
    model, step = _made("llama")
    model.gradient_checkpointing_enable()
    found = nanhunt.compare(model, step, b="autocast:bfloat16")
    assert found.first is None and found.gradient_cosine > LINE and found.died is None
    batch = _batch("llama")

    def looked() -> None:
        with torch.inference_mode():
            model(**batch)

    _rounded(model.get_submodule("model.layers.1.mlp.up_proj"))
    assert nanhunt.compare(model.eval(), looked, b="as_is").first == "model.layers.1.mlp.up_proj"


def test_batches_are_compared_one_by_one_from_the_same_state() -> None:
    model, _ = _net()
    small, large = torch.randn(8, 16), 100 * torch.randn(8, 16)
    found = nanhunt.compare(model, lambda x: model(x), b="bfloat16", batches=[small, large, small])
    assert found.batches == 3 and len(found.outputs) == 3
    assert found.outputs[0] == found.outputs[2] != found.outputs[1]
    assert found.output_cosine == min(one.cosine for one in found.outputs) <= found.mean_output_cosine
    assert found.modules["head"].mean_cosine >= found.modules["head"].cosine


def test_without_room_a_sample_is_compared_and_said_so() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 512)), torch.randn(600, 32)
    whole = nanhunt.compare(model, lambda: model(x), b="bfloat16")
    part = nanhunt.compare(model, lambda: model(x), b="bfloat16", room=0)
    assert 1 - part.output_cosine == pytest.approx(1 - whole.output_cosine, rel=0.5)
    assert part.output_cosine != whole.output_cosine
    assert any("sample" in note for note in part.notes) and part.first is None


def test_two_models_with_the_same_names_are_compared_through_one_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight.mul_(1.001)
    before, kind = vars(model), type(model)
    x = torch.randn(16, 8)
    found = nanhunt.compare(model, lambda: model(x), a=model, b=other)
    assert found.parted == ("2",) and found.b == "model b (Sequential)"
    assert vars(model) is before and type(model) is kind


def test_a_compiled_model_is_compared_with_the_eager_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(16, 8)
    found = nanhunt.compare(model, lambda: model(x).square().mean().backward(), b="compiled")
    assert found.agree and found.first is None and list(found.modules) == [""], str(found)
    assert found.gradient_cosine > LINE


# --- settings ------------------------------------------------------------------------------------------------


def test_words_are_read_as_settings() -> None:
    assert parse(torch.float16, "a") == parse("half", "b").__class__(label="float16", dtype=torch.float16)
    mixed = parse("float32, tf32, sdpa:math", "a")
    assert (mixed.dtype, mixed.switches, mixed.sdpa) == (torch.float32, ("tf32",), "math")
    assert parse("autocast:bf16", "b").autocast is torch.bfloat16
    assert parse("float32", "a").strict and not parse("float32,casts", "a").strict


@pytest.mark.parametrize("word", ["float8", "autocast:float32", "sdpa:fast", "", 7, "float32,float16", "casts"])
def test_a_word_that_is_none_is_refused_with_the_legal_ones(word: Any) -> None:
    model, step = _net()
    with pytest.raises(nanhunt.UsageError, match=r"b.*"):
        nanhunt.compare(model, step, b=word)


def test_switches_are_turned_for_the_run_and_back() -> None:
    model, _ = _net()
    seen: list[bool] = []
    before = torch.backends.cuda.matmul.allow_tf32

    def step() -> None:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        model(torch.ones(4, 16))

    nanhunt.compare(model, step, a="no_tf32", b="tf32")
    assert seen[:2] == [False, True] and torch.backends.cuda.matmul.allow_tf32 == before


def test_float32_is_meant_in_earnest_unless_the_casts_are_wanted() -> None:
    class Secret(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).to(x.dtype)

    torch.manual_seed(0)
    model, x = nn.Sequential(Secret(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)
    assert nanhunt.compare(model, lambda: model(x), a="float32", b="as_is").first == "0"
    assert nanhunt.compare(model, lambda: model(x), a="float32,casts", b="as_is").identical


def test_the_step_may_bring_its_own_autocast() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 8)), torch.randn(16, 8)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            model(x)

    found = nanhunt.compare(model, step, b="as_is")
    assert found.first is None and found.agree and found.output_cosine < 1
    assert found.outputs[0].dtypes == ("float32", "float16")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": 3}, "model is a int"),
        ({"step": 3}, "needs a function"),
        ({"batches": []}, "batches is empty"),
        ({"batches": torch.ones(3)}, "give a list of batches"),
        ({"room": -1}, "room=-1"),
        ({"step": lambda: None}, "has not called the model"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    model, step = _net()
    with pytest.raises(nanhunt.UsageError, match=said):
        nanhunt.compare(**({"model": model, "step": step} | given))


def test_switched_off_it_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    found = nanhunt.compare(nn.Linear(2, 2), lambda: pytest.fail("ran"))
    assert found.first is None and not found.agree and not found.calls


# --- figures -------------------------------------------------------------------------------------------------


def test_figures_are_what_they_say() -> None:
    from nanhunt.precision.alike import figures

    a = torch.tensor([1.0, 2.0, -4.0, 0.0])
    b = torch.tensor([1.0, 2.5, -4.0, 0.0])
    told = figures(a, b, "x", "float16")
    assert (told.max_abs, told.max_rel) == (0.5, 0.25)
    assert told.max_ulps == 0.5 / 2**-9  # an ulp of float16 at 2 is 2 ** -9
    assert told.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, dim=0)), abs=1e-7)
    assert told.error == pytest.approx(0.5 / math.sqrt(21))
    assert figures(a, a.clone(), "x").cosine == 1.0


def test_figures_leave_out_what_is_not_finite_and_name_it() -> None:
    from nanhunt.precision.alike import figures

    inf, nan = math.inf, math.nan
    told = figures(torch.tensor([1.0, inf, 2.0, nan, -inf]), torch.tensor([1.0, inf, nan, 3.0, -inf]), "x")
    assert told.only_b == ("1 nan",) and told.only_a == ("1 nan",)
    assert told.count == 1 and told.cosine == 1.0


# --- the record, its pages, the doors ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parted() -> Likeness:
    model, _ = _made("bert", train=False)
    _rounded(model.get_submodule("bert.encoder.layer.0.attention.output.dense"))
    batch = _batch("bert")
    return nanhunt.compare(model, lambda: model(**batch).loss.backward(), b="float16")


def test_the_record_goes_to_json_and_back(parted: Likeness) -> None:
    again = Likeness.from_json(parted.to_json())
    assert again.to_dict() == parted.to_dict() and str(again) == str(parted) and again.first == parted.first
    told = parted.to_dict()
    assert told["first"] == parted.first and told["agree"] is False and told["output_cosine"] == parted.output_cosine


@pytest.mark.parametrize("told", [{}, [], {"kind": "likeness", "format": 99}, {"kind": "likeness", "format": 1}])
def test_what_is_no_record_is_refused(told: Any) -> None:
    with pytest.raises(nanhunt.UsageError):
        Likeness.from_dict(told)


def test_the_page_for_the_terminal_fits_and_says_where(parted: Likeness) -> None:
    page = str(parted)
    assert max(map(len, page.splitlines())) <= 100 and len(page.splitlines()) <= 70
    assert page.startswith("bert.encoder.layer.0.attention.output.dense (Linear) is where float16 parts from float32")
    for heading in ("Where they part", "What to do", "Along the model", "Gradients of parameters"):
        assert heading in page


def test_the_page_for_the_browser_loads_nothing_and_escapes_everything() -> None:
    figures = Figures(
        tensor="output<b>", dtypes=("float32", "float16"), cosine=0.5, max_abs=math.inf, max_rel=1.0, error=1.0,
        ulps=3.0, max_ulps=math.inf, lower="float16", sizes=(1.0, 1.0), count=3, only_b=("1 nan",),
    )  # fmt: skip
    call = Call(module="<script>", type="T", call=1, batch=0, output=figures)
    record = Likeness(a="float32", b="<i>", calls=(call,), outputs=(figures,), died="<u>")
    html = record.html()
    assert "<script" not in html and "<i>" not in html and "<u>" not in html and "&lt;script&gt;" in html
    assert "Content-Security-Policy" in html and "http://" not in html and "https://" not in html
    assert record.not_finite == "<script>" and "iframe" in record._repr_html_()


_FACTORY = """
import torch
from torch import nn

class Secret(nn.Linear):
    def forward(self, x):
        return super().forward(x).bfloat16().to(x.dtype)

def healthy():
    torch.manual_seed(0)
    return {"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "example": torch.randn(16, 8)}

def planted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Secret(8, 8))
    return {"model": model, "step": lambda x: model(x), "batches": [torch.randn(16, 8) for _ in range(3)]}
"""


@pytest.fixture
def factory(tmp_path: Path) -> str:
    (tmp_path / "made_for_compare.py").write_text(_FACTORY)
    return str(tmp_path / "made_for_compare.py")


def test_the_command_says_with_its_exit_code_whether_they_agree(
    factory: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compare", f"{factory}:healthy", "--b", "bfloat16"]) == 0
    assert "agree" in capsys.readouterr().out
    assert main(["compare", f"{factory}:planted", "--b", "as_is", "--batches", "2", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"] == "1" and told["batches"] == 2
    out = tmp_path / "page.html"
    assert main(["compare", f"{factory}:planted", "--b", "float16", "--html", "-o", str(out)]) == 1
    assert "parts from float32" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--b", "float8"], "is no setting"), (["--batches", "2"], "gives no batches"), (["--batches", "0"], "1 or more")],
)
def test_the_command_refuses_what_will_not_do(
    factory: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", f"{factory}:healthy", *more]) == 2
    assert said in capsys.readouterr().err


def test_the_assertion_holds_for_the_healthy_and_fails_for_the_planted(nanhunt: Any) -> None:
    from nanhunt.pytest_plugin import PrecisionParts, assert_close_precision

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(32, 8)
    assert nanhunt.assert_close_precision(model, lambda: model(x), b="bfloat16").agree
    with pytest.raises(PrecisionParts, match=r"below 0\.9999999"):
        assert_close_precision(model, lambda: model(x), b="bfloat16", cosine=0.9999999)
    with pytest.raises(PrecisionParts, match="there are no gradients"):
        assert_close_precision(model, lambda: model(x), b="bfloat16", gradient_cosine=0.9)
    _rounded(model[1])
    with pytest.raises(AssertionError, match=r"^1 \(LayerNorm\) is where float16 parts from float32") as caught:
        assert_close_precision(model, lambda: model(x))
    assert caught.value.likeness.first == "1"  # type: ignore[attr-defined]
