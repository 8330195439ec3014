"""Number formats: autocast, halves, float8, quantised, meta and fake tensors, loss scaling."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .harness import Spans
from .models import Net, batch, conv_net, mlp, situation, squared, step
from .outputs import Returns


@situation()
def autocast_bf16(watch: Spans) -> object:
    """Forward in bfloat16 autocast, backward outside."""
    model = Net()
    with watch(model):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch())
            loss = F.cross_entropy(out, torch.tensor([0, 1, 2, 0, 1]))
        loss.backward()
    return [model, out, loss]


@situation()
def autocast_fp16(watch: Spans) -> object:
    """float16 autocast around the watch, a float32 island inside."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                return self.b(y.float())

    with torch.autocast("cpu", torch.float16):
        return step(watch, nn.Sequential(Island(), nn.LayerNorm(4), nn.Linear(4, 3)), batch())


@situation()
def autocast_weight_cache(watch: Spans) -> object:
    """One weight is cast once and cached; the watch opens inside the autocast block, and the cache may be off."""
    model, made = nn.Linear(4, 4), []
    for cache in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache), watch(model):
            out = model(model(batch()))
            squared(out).backward()
            made.append(out)
    return [model, made]


@situation()
def half_model(watch: Spans) -> object:
    """Weights and batch in float16, no autocast."""
    return step(watch, Net().half(), batch().half())


@situation()
def bf16_model(watch: Spans) -> object:
    """Weights and batch in bfloat16, no autocast."""
    return step(watch, Net().bfloat16(), batch().bfloat16())


@situation()
def f64_model(watch: Spans) -> object:
    """Everything in float64, made under a changed default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return step(watch, Net(), batch())
    finally:
        torch.set_default_dtype(torch.float32)


@situation()
def mixed_dtypes(watch: Spans) -> object:
    """Layers of three formats with casts between them, frozen norms in float32."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    layers = [nn.Linear(4, 4), Cast(torch.bfloat16), nn.Linear(4, 4).bfloat16(), Cast(torch.float64)]
    layers += [nn.Linear(4, 4).double(), Cast(torch.float16), nn.LayerNorm(4).half(), Cast(torch.float32)]
    return step(watch, nn.Sequential(*layers), batch())


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@situation()
def float8_out(watch: Spans) -> object:
    """Outputs in each float8 format."""
    model = Returns(lambda y: [y, *(y.detach().to(getattr(torch, name)) for name in FLOAT8)])
    return step(watch, model, batch(), loss=lambda o: squared(o[0]))


@situation()
def float8_weights(watch: Spans) -> object:
    """Weights kept in float8 as buffers and parameters, dequantised in forward."""

    class Eight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(4, 4).to(torch.float8_e4m3fn))
            self.v = nn.Parameter(torch.randn(4).to(torch.float8_e5m2), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w.float() * self.scale) + self.v.float()

    return step(watch, Eight(), batch())


@situation(sees=False)
def rare_dtypes_out(watch: Spans) -> object:
    """Outputs in unsigned, half complex, float4 and bit types."""

    class Rare(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            outs = [torch.ones(3, dtype=getattr(torch, f"uint{bits}")) for bits in (8, 16, 32, 64)]
            outs += [torch.ones(3, dtype=torch.complex128), torch.zeros(3, dtype=torch.uint8)]
            if hasattr(torch, "float4_e2m1fn_x2"):
                outs.append(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
            if hasattr(torch, "float8_e8m0fnu"):
                outs.append(torch.full((3,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outs.append(torch.zeros(3, dtype=torch.complex32))
            return outs

    model = nn.Sequential(Rare())
    with watch(model):
        outs = model(batch())
    return [[str(o.dtype), tuple(o.shape)] for o in outs]


def _quantized(dynamic: bool) -> nn.Module:
    from torch.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare, quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamic:
            return quantize_dynamic(mlp(4, 6, 3), {nn.Linear}, dtype=torch.qint8)
        model = nn.Sequential(QuantStub(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), DeQuantStub()).eval()
        model.qconfig = get_default_qconfig(torch.backends.quantized.engine)
        ready = prepare(model)
        ready(batch())
        return convert(ready)


@situation()
def quantized_dynamic(watch: Spans) -> object:
    """Dynamic quantisation: packed weights that are no parameters."""
    model = _quantized(dynamic=True)
    with watch(model), torch.no_grad():
        return model(batch())


@situation()
def quantized_static(watch: Spans) -> object:
    """Static quantisation: quantised tensors flow between modules."""
    model = _quantized(dynamic=False)
    with watch(model), torch.no_grad():
        out = model(batch())
        middle = model[1](model[0](batch()))
    return [out, middle]


@situation()
def quantization_aware(watch: Spans) -> object:
    """Fake quantisation with moving observers, whose minimum starts at +Inf: legal buffers."""
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = get_default_qat_qconfig("fbgemm")
        ready = prepare_qat(model)
    step(watch, ready, batch())
    return step(watch, ready, batch())


@situation(sees=False)
def meta_model(watch: Spans) -> object:
    """A model on the meta device, forward and backward."""
    with torch.device("meta"):
        model = Net()
    with watch(model):
        out = model(torch.empty(5, 4, device="meta"))
        squared(out).backward()
    return [model, out]


@situation()
def meta_then_real(watch: Spans) -> object:
    """Deferred initialisation: the model is made on meta, filled while watched, then used."""
    with torch.device("meta"):
        model = mlp(4, 6, 3)
    with watch(model):
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.1)
        squared(model(batch())).backward()
    return model


@situation(sees=False)
def fake_tensor_mode(watch: Spans) -> object:
    """A step under FakeTensorMode, as memory estimators take it, with a model that is fake too."""
    with FakeTensorMode():
        model = Net()
        with watch(model):
            out = model(torch.randn(5, 4))
            squared(out).backward()
    return [str(out.shape), out.requires_grad]


@situation(sees=False)
def fake_run_of_real_model(watch: Spans) -> object:
    """A real model called with fake tensors while it is watched."""
    model = Net()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with watch(model), mode:
        out = model(mode.from_tensor(batch()))
    return [model, str(out.shape)]


def _scaled(watch: Spans, init_scale: float, hand_over: bool, steps: int = 4, **options: Any) -> object:
    model = Net().half()
    for p in model.parameters():
        p.data = p.data.float()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    scales, losses = [], []
    given = (optimizer, scaler) if hand_over else ()
    with watch(model, *given, **options):
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = squared(model(batch()))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses += [loss, norm]
    return [model, optimizer, scaler.state_dict(), scales, losses]


@situation()
def grad_scaler_clip_optim(watch: Spans) -> object:
    """float16 autocast with a GradScaler, unscale, clip and step."""
    return _scaled(watch, 2.0**10, hand_over=True)


@situation()
def grad_scaler_found(watch: Spans) -> object:
    """The same with a scaler and an optimizer that nobody hands over."""
    return _scaled(watch, 2.0**10, hand_over=False)


@situation()
def grad_scaler_calibrates(watch: Spans) -> object:
    """A scale of 2^24 overflows in the first steps and falls: calibration, not a fault."""
    return _scaled(watch, 2.0**24, hand_over=True, steps=14)


@situation()
def grad_scaler_calibrates_alone(watch: Spans) -> object:
    """The same, found by the watch itself."""
    return _scaled(watch, 2.0**24, hand_over=False, steps=14)


@situation()
def grad_scaler_disabled(watch: Spans) -> object:
    """A disabled scaler does nothing, watched or not."""
    model = mlp(4, 4, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=False)
    with watch(model, optimizer, scaler):
        scaler.scale(squared(model(batch()))).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler.state_dict()]


@situation()
def swap_module_to_dtype(watch: Spans) -> object:
    """Conversion by swap_tensors, which refuses tensors that anyone holds a weak reference to."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = mlp(4, 6, 3)
        with watch(model):
            first = model(batch())
            squared(first).backward()
            del first
            model.zero_grad()
            model.double()
            second = model(batch().double())
            squared(second).backward()
        return [model, second]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@situation()
def model_changes_dtype(watch: Spans) -> object:
    """float, half, back, .data replaced, all while watched."""
    model, outs = mlp(4, 6, 3), []
    with watch(model):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model.to(dtype).zero_grad()
            out = model(batch().to(dtype))
            squared(out).backward()
            outs.append(out)
        model[0].weight.data = torch.ones(6, 4, dtype=torch.float64)
        squared(model(batch().double())).backward()
    return [model, outs]


@situation()
def deterministic_algorithms(watch: Spans) -> object:
    """use_deterministic_algorithms, which also fills new memory with NaN: empty tensors are full of it."""
    torch.use_deterministic_algorithms(True)
    try:
        return step(watch, conv_net(), batch(2, 3, 14, 14))
    finally:
        torch.use_deterministic_algorithms(False)
