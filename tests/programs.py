# ruff: noqa: E501  programs read better in long lines
"""Random small programs, each a real file: nested models with one planted op fault, or with nothing wrong at all.

`python -m tests.programs 500` writes 500 of each kind, runs them under watch and counts the right answers.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nanhunt

HEADER = """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

INF = float("inf")


class BadGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0 / torch.zeros_like(grad)  # {mark}


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()  # {mark 2}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return (grad / torch.zeros_like(grad)).clamp(0, 0).nan_to_num(0.0) + grad * 0.5


class Pair(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *, size=None):
        return {"hidden": self.inner(x), "size": [x.detach().abs().amax(), size]}
"""
# Statements that hand on a finite x of the same shape, whatever infinities they use on the way.
HEALTHY = """
x = x * 0.5 + 0.1
x = torch.where(x > 0, x, x * 0.5)
x = x + x.masked_fill(x < x.amax(-1, keepdim=True), -INF).softmax(-1)
x = x + x.masked_fill(x < x.topk(3, -1).values[..., -1:], -INF).softmax(-1)
x = x - torch.logsumexp(torch.cat([x, torch.full_like(x[:, :2], -INF)], -1), -1, keepdim=True)
x = x + F.max_pool1d(x.unsqueeze(1), 3, 1, 1).squeeze(1)
x = x.clone().add_(0.1).mul_(0.5)
x = x.clone(); x[:, 0] = x[:, 0] * 0.5
x = x.clone(); x[1:].mul_(0.5)
x = x / (x.abs().sum(-1, keepdim=True) + 1e-2)
x = x.view(2, 2, 8).transpose(0, 1).reshape(4, 8)
x = torch.cat(x.chunk(2, -1)[::-1], -1)
d = x.relu(); x = torch.where(d > 0, x / torch.where(d > 0, d, 1.0), x)
x = torch.where(torch.ones_like(x).bool(), x, x.detach() / 0.0)
x = x + (x.detach() / torch.zeros_like(x)).nan_to_num(0.0, 0.0, 0.0)
x = torch.logaddexp(x.float(), torch.full_like(x.float(), -INF)).to(x.dtype)
x = x.masked_fill(torch.log(x.detach().relu()).isneginf(), 0.0)
x = (x @ x.T + torch.full_like(x[:, :4], -INF).triu(1)).softmax(-1) @ x
x = torch.stack([x, x.flip(-1)]).mean(0)
x = x + torch.clamp(x.detach() / 0.0, -1.0, 1.0).nan_to_num(0.0)
x = torch.sqrt(x * x + 1e-2)
x = torch.log(x.abs() + 1e-2)
x = F.normalize(x.float(), dim=-1).to(x.dtype)
x = torch.log_softmax(x, -1)
x = torch.minimum(x, torch.full_like(x, INF))
x = x + torch.exp(torch.where(x > 1, -INF, x.detach()))
x = x.cumsum(-1) * 0.1
x = x + F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=torch.ones(4, 4).tril().bool())[0]
x = x + x.masked_fill(torch.arange(8) > 5, -INF).exp()
with torch.autocast("cpu", torch.bfloat16): x = x + ((x @ x.T).softmax(-1).to(x.dtype) @ x * 0.1).to(x.dtype)
with torch.autocast("cpu", enabled=False): x = x + F.layer_norm(x.float(), (8,)).to(x.dtype) * 0.1
with torch.no_grad(): self.ema.mul_(0.9).add_(x.mean().float() * 0.1)
x.requires_grad and x.register_hook(lambda grad: grad * 0.5)
x = Scaled.apply(x)
x = x.float().masked_fill(torch.arange(8) > 5, INF).sort(-1).values[:, :6].repeat(1, 2)[:, :8].to(x.dtype)
""".strip().splitlines()
CHILDREN = (
    "nn.Linear(8, 8)",
    "nn.LayerNorm(8)",
    "nn.ReLU()",
    "nn.GELU()",
    "nn.Dropout(0.1)",
    "nn.Tanh()",
    "nn.Identity()",
    "nn.BatchNorm1d(8)",
    "nn.TransformerEncoderLayer(8, 2, 16)",
    "nn.Sequential(nn.Linear(8, 4), nn.SiLU(inplace=True), nn.Linear(4, 8))",
)
CALLS = (
    "x = self.{c}(x)",
    "x = x + self.{c}(x)",
    "x = torch.stack([x, self.{c}(x)]).mean(0)",
    "x = self.{c}(self.{c}(x))",
    "x = checkpoint(self.{c}, x, use_reentrant=True)",
    "x = x + checkpoint(self.{c}, x, use_reentrant=False)",
    "x = checkpoint(lambda v: self.{c}(v) * 0.5, x, use_reentrant=False)",
)


# The same in the code of the loss.
HEALTHY_LOSSES = """
loss = loss + F.cross_entropy(out.float().masked_fill(torch.arange(8) > 5, -INF), torch.arange(4))
loss = loss + torch.where(y > 0, out.float().abs() + 1, 1.0).log().mean()
loss = loss + F.ctc_loss(out.float()[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))
loss = loss + torch.nan_to_num(y / 0.0, 0.0, 0.0, 0.0).mean()
loss = loss * (1.0 if torch.isfinite(loss) else 0.0)
loss = loss + out.float().masked_select(out > -1e4).mean()
""".strip().splitlines()


@dataclass(frozen=True)
class Fault:
    """A line that goes wrong, the op that is to be named, in which phase, and where it can be had."""

    line: str
    op: str
    phase: str = "forward"
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16", "autocast")
    marked: bool = True  # the line itself is the answer; else one that stands in the header already
    child: str | None = None  # the module of the block that makes the value


NAN_AFTER = "; x = x - x"  # an Inf that tanh would swallow becomes a NaN
FAULTS = (
    Fault("x = x / self.zero * 0", "aten.div.Tensor"),
    Fault("x = torch.log(x * self.zero - 1)", "aten.log.default"),
    Fault("x = torch.sqrt(-x.abs() - 1)", "aten.sqrt.default"),
    Fault("x = torch.acos(x * self.zero + 2)", "aten.acos.default"),
    Fault("x = (-x.abs() - 1) ** 0.5", "aten.pow.Tensor_Scalar"),
    Fault("x = x.masked_fill(torch.ones_like(x).bool(), -INF).softmax(-1)", "aten._softmax.default"),
    Fault("x = x * self.zero * INF", "aten.mul.Tensor"),
    Fault("x = x + x[:1, :1].std()", "aten.std.correction"),
    Fault("x = x + x[:0].mean()", "aten.mean.default"),
    Fault("x = (x * self.zero).div_(self.zero)", "aten.div_.Tensor"),
    Fault("x = x.clone(); x[:, 1] = torch.sqrt(-x[:, 1].clone().abs() - 1)", "aten.sqrt.default"),
    Fault("x = x.clone(); x[:, 2].sub_(100).sqrt_()", "aten.sqrt_.default"),
    Fault("x = (x.abs() + 2) * torch.finfo(x.dtype).max" + NAN_AFTER, "aten.mul.Tensor"),
    Fault("x = torch.exp(x.abs() + 100)" + NAN_AFTER, "aten.exp.default"),
    Fault("x = ((x.float().abs() + 1) * 1e6).half()" + NAN_AFTER + ".float()", "aten._to_copy.default", dtypes=("float32",)),
    Fault("x = F.normalize(x * self.zero, dim=-1)", "aten.div.Tensor", dtypes=("float16",)),
    Fault("x = F.layer_norm(x * self.zero, (8,), eps=0.0)", "aten.native_layer_norm.default", dtypes=("float32",)),
    Fault("x = (x.abs() + 1) @ (torch.ones_like(x).T * torch.finfo(x.dtype).max) @ x * 0", "aten.mm.default", dtypes=("float32", "float16", "bfloat16")),
    Fault("x = x + torch.sqrt(x * self.zero)", "aten.sqrt.default", "backward"),
    Fault("x = x + torch.acos(x * self.zero + 1)", "aten.acos.default", "backward"),
    Fault("x = x + (x * self.zero) ** 0.5", "aten.pow.Tensor_Scalar", "backward"),
    Fault("x = torch.where(x > -1e4, x, torch.sqrt(x * self.zero))", "aten.sqrt.default", "backward"),
    Fault("x = x + torch.hypot(x * self.zero, x * self.zero)", "aten.hypot.default", "backward", dtypes=("float32",)),
    Fault("x = x + (x.float() * 1e8).remainder(1.0).to(x.dtype)", "aten._to_copy.default", "backward", dtypes=("float16",)),
    Fault("x = x + x.detach() * self.zero / self.zero", "aten.div.Tensor"),
    Fault("self.ema.copy_((x.detach() * self.zero / self.zero).mean())", "aten.div.Tensor"),
    Fault("with torch.no_grad(): self.ema.add_((x * self.zero - 1).log().mean())", "aten.log.default"),
    Fault('with torch.autocast("cpu", torch.float16): x = (x.abs() + 1) @ (torch.ones_like(x).T * 6e4) @ x; x = x.float() * 0', "aten.mm.default", dtypes=("float32",)),
    Fault('with torch.autocast("cpu", enabled=False): x = (x.float() * self.zero / self.zero).to(x.dtype)', "aten.div.Tensor"),
    Fault("x = self.bad_norm(x * self.zero)", "aten.native_layer_norm.default", dtypes=("float32",), child="bad_norm"),
    Fault("x = self.bad_softmax(torch.full_like(x, -INF) + x)", "aten._softmax.default", child="bad_softmax"),
    Fault("x = x + self.bad_twice(x)", "aten.sqrt.default", "backward", child="bad_twice", marked=False),
    Fault("x.requires_grad and x.register_hook(lambda grad: grad / (grad * 0))", "aten.div.Tensor", "backward"),
    Fault("x = BadGrad.apply(x)", "aten.div.Tensor", "backward", marked=False),
    Fault("x = x.clone(); x[:, :4] = x[:, :4] + torch.sqrt(x[:, 4:] * self.zero)", "aten.sqrt.default", "backward"),
)  # fmt: skip
LOSSES = (
    Fault("loss = torch.log(loss * 0 - 1)", "aten.log.default"),
    Fault("loss = loss * 0 / torch.zeros(())", "aten.div.Tensor"),
    Fault("loss = loss + F.cross_entropy(out.float(), torch.full((4,), -100))", "aten.nll_loss.default"),
    Fault("loss = loss + out[out.float() > 1e9].float().mean()", "aten.mean.default"),
    Fault("loss = loss + torch.sqrt(out.float().sum() * 0)", "aten.sqrt.default", "backward"),
)
UPDATES = (
    Fault('optimizer.param_groups[0]["lr"] = float("nan"); optimizer.step()', "aten.add_.Tensor", "optimizer"),
    Fault('optimizer.param_groups[0].update(lr=float("nan"), foreach=True); optimizer.step()', "aten._foreach_add_.List", "optimizer"),
    Fault('optimizer.param_groups[0]["weight_decay"] = INF; optimizer.step()', "aten.add.Tensor", "optimizer"),
    Fault("torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], INF); optimizer.step()", "aten._foreach_mul_.Scalar", "optimizer"),
    Fault("torch.nn.utils.clip_grad_norm_(model.parameters(), float('nan')); optimizer.step()", "aten.mul.Tensor", "optimizer"),
    Fault("[p.detach().sub_(p.grad / (p.grad * 0)) for p in model.parameters() if p.grad is not None]", "aten.div.Tensor", "optimizer"),
)  # fmt: skip
BODY = (
    'self.register_buffer("zero", torch.zeros(()))',
    'self.register_buffer("ema", torch.zeros(()))',
    "self.bad_norm, self.bad_softmax, self.bad_twice = nn.LayerNorm(8, eps=0.0), nn.Softmax(-1), Root()",
)
DTYPES = ("float32", "float16", "bfloat16", "autocast")
MARK = "the fault"


@dataclass
class Block:
    name: str
    path: str
    children: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass
class Program:
    """The text of a program and, when something was planted, the right answer."""

    seed: int
    source: str
    dtype: str
    scaler: bool = False
    late: bool = False  # the fault comes in the second step only
    adam: bool = False
    micro: int = 1  # batches a step
    fault: Fault | None = None
    module: str | None = None

    @property
    def line(self) -> int:
        return next(i for i, text in enumerate(self.source.splitlines(), 1) if text.endswith("# " + MARK))


def _cured(source: str, fault: Fault) -> str:
    """The same program without what was planted."""
    lines = source.splitlines()
    at = next(i for i, text in enumerate(lines) if text.endswith("# " + MARK))
    instead = (
        "optimizer.step()"
        if fault in UPDATES
        else "pass"
        if fault.marked
        else "return x"
        if fault.child
        else "return grad"
    )
    lines[at] = lines[at][: len(lines[at]) - len(lines[at].lstrip())] + instead
    return "\n".join(lines) + "\n"


def _blocks(rng: random.Random, path: str, depth: int, found: list[Block]) -> Block:
    block = Block(f"Block{len(found)}", path)
    found.append(block)
    for i in range(rng.randint(2, 4)):
        if rng.random() < 0.55:
            block.lines.append(rng.choice(HEALTHY))
            continue
        child = f"c{i}"
        if depth and rng.random() < 0.6:
            below = f"{path}.{child}" if path else child
            if rng.random() < 0.3:
                inner = _blocks(rng, f"{below}.inner", depth - 1, found)
                block.children.append(f"self.{child} = Pair({inner.name}())")
                block.lines.append(f'x = x + self.{child}(x, size={{"n": 4}})["hidden"]')
                continue
            if rng.random() < 0.2:
                inner = _blocks(rng, f"{below}.1", depth - 1, found)
                block.children.append(
                    f"self.{child} = nn.Sequential(nn.Linear(8, 8), {inner.name}(), nn.Linear(8, 8), nn.ReLU(inplace=True))"
                )
                block.lines.append(rng.choice(CALLS).format(c=child))
                continue
            inner = _blocks(rng, below, depth - 1, found)
            block.children.append(f"self.{child} = {inner.name}()")
            if rng.random() < 0.2:  # registered twice, called under either name
                block.children.append(f"self.{child}_again = self.{child}")
                block.lines.append(f"x = self.{child}_again(x)")
        else:
            block.children.append(f"self.{child} = {rng.choice(CHILDREN)}")
        block.lines.append(rng.choice(CALLS).format(c=child))
    return block


def draw(seed: int, *, planted: bool) -> Program:
    """The program of a seed."""
    rng = random.Random(f"{seed} {planted}")
    blocks: list[Block] = []
    _blocks(rng, "", 3, blocks)
    dtype = rng.choice(DTYPES)
    loss, update = ["loss = (out.float() - y).pow(2).mean()"], "optimizer.step()"
    program = Program(seed, "", dtype, scaler=dtype == "autocast" and rng.random() < 0.5)
    program.adam = dtype in ("float32", "autocast") and rng.random() < 0.5
    if rng.random() < 0.5:
        loss.append(rng.choice(HEALTHY_LOSSES))
    marks, helper = {"# {mark}": "", "# {mark 2}": ""}, ""
    if planted:
        where = rng.choice(("model",) * 6 + ("loss", "update"))
        fitting = [f for f in {"model": FAULTS, "loss": LOSSES, "update": UPDATES}[where] if dtype in f.dtypes]
        fault = program.fault = rng.choice(fitting)
        text = f"{fault.line}  # {MARK}" if fault.marked else fault.line
        if not fault.marked:
            marks["# {mark 2}" if fault.child else "# {mark}"] = "# " + MARK
        if where == "model" and rng.random() < 0.3 and not text.startswith("with"):
            program.late, text = True, "if self.training: " + text
        if where == "model" and rng.random() < 0.2:
            helper = f"\n\n\ndef helper(self, x):\n    {text}\n    return x"
            text = "x = helper(self, x)"
        if where == "model":
            block = rng.choice(blocks)
            program.module = ".".join(part for part in (block.path, fault.child) if part)
            block.lines.insert(rng.randint(0, len(block.lines)), text)
        elif where == "loss":
            loss.append(text)
        else:
            update, program.scaler, program.adam = text, False, False
    text = HEADER
    for mark, now in marks.items():
        text = text.replace("  " + mark, now and "  " + now)
    text = text.rstrip()
    text += helper
    for block in reversed(blocks):
        body = ["super().__init__()", *BODY, *block.children]
        forward = block.lines
        if block.path == "":
            body.append("self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)")
            forward = ["x = self.first(x)", *block.lines, "x = self.last(torch.tanh(x))"]
        else:
            forward = [*block.lines, "x = torch.tanh(x)"]
        text += f"\n\n\nclass {block.name}(nn.Module):\n    def __init__(self):\n"
        text += "".join(f"        {line}\n" for line in body) + "\n    def forward(self, x):\n"
        text += "".join(f"        {line}\n" for line in [*forward, "return x"])
        text = text.rstrip()
    penalty = dtype == "float32" and not any(
        word in text for word in ("use_reentrant=True", "scaled_dot", "BadGrad.apply", "ctc_loss")
    )
    penalty = penalty and not any("ctc_loss" in line for line in loss) and rng.random() < 0.5
    if penalty:  # of the gradient with regard to the input: a backward that is differentiated
        loss.insert(
            1, "loss = loss + (torch.autograd.grad(out.sum(), x, create_graph=True)[0].norm() - 1).pow(2) * 1e-3"
        )
    text += "\n\n\ndef step(model, optimizer, x, y, scaler=None):\n"
    program.micro = rng.choice((1, 1, 1, 2))
    if rng.random() < 0.15:
        text += "    with torch.no_grad():\n        model(x)\n"
    given = "x.requires_grad_()" if penalty else "x"
    text += f"    for _ in range({program.micro}):\n"
    text += f"        with torch.autocast('cpu', torch.float16, enabled={dtype == 'autocast'}):\n            out = model({given})\n"
    text += "".join(f"        {line}\n" for line in loss)
    if program.scaler:
        text += "        scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
    else:
        text += f"        loss.backward()\n    {update}\n"
    text += "    optimizer.zero_grad()\n    return loss.detach()\n"
    program.source = text
    return program


class Loaded:
    """A program that was written to a file and imported from there."""

    def __init__(self, program: Program, folder: str, kind: str = "") -> None:
        self.program, self.errors = program, list[str]()  # failures of the watch itself
        name = f"program_{kind or ('planted' if program.fault else 'healthy')}_{program.seed}"
        self.path = os.path.join(folder, name + ".py")
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(program.source)
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None and spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def make(self) -> tuple[Any, ...]:
        torch.manual_seed(self.program.seed)
        model = self.module.Block0()
        x, y = torch.randn(4, 8), torch.randn(4, 8)
        if self.program.dtype in ("float16", "bfloat16"):
            dtype = getattr(torch, self.program.dtype)
            model, x = model.to(dtype), x.to(dtype)
        optimizer = (torch.optim.AdamW if self.program.adam else torch.optim.SGD)(model.parameters(), lr=1e-3)
        scale = 2.0**20 if self.program.fault is None else 2.0**4
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if self.program.scaler else None
        return model, optimizer, x, y, scaler

    @property
    def steps(self) -> int:
        if self.program.fault is None:
            return 6 if self.program.scaler else 2
        return 2 if self.program.late else 1

    def mode(self, model: Any, step: int) -> None:
        """A late fault stands behind `if self.training`: the first step runs without it."""
        if self.program.late:
            model.train(step > 0)

    def harmed(self) -> bool:
        """Without any watch: is there a loss, a gradient or a weight that is not finite, and was there none before?"""
        model, optimizer, x, y, scaler = self.make()
        bad = False
        keep = optimizer.zero_grad
        optimizer.zero_grad = lambda: None
        for step in range(self.steps):
            self.mode(model, step)
            loss = self.module.step(model, optimizer, x, y, scaler)
            values = [loss, *model.parameters(), *model.buffers()]
            if scaler is None or self.program.fault is not None:
                values += [p.grad for p in model.parameters() if p.grad is not None]
            bad = not all(bool(torch.isfinite(v).all()) for v in values)
            if bad and step < self.steps - 1:
                return self.program.fault is None
            keep()
        return bad

    def watched(self, detail: str) -> Any:
        """What is found, or None."""
        model, optimizer, x, y, scaler = self.make()
        with nanhunt.watch(model, optimizer, scaler, detail=detail, on_hit="record") as hunt:
            for step in range(self.steps):
                self.mode(model, step)
                self.module.step(model, optimizer, x, y, scaler)
                if hunt.finding is not None:
                    break
        self.errors += [f"failed: {type(error).__name__}: {error}".splitlines()[0] for error in hunt.errors]
        return hunt.finding


def mistakes(loaded: Loaded) -> list[str]:
    """What is wrong in the answer on a planted program."""
    program, found = loaded.program, loaded.watched("op")
    fault = program.fault
    assert fault is not None
    if found is None or loaded.errors:
        return ["nothing found", *loaded.errors]
    right = {
        "step": loaded.steps - 1,
        "phase": fault.phase,
        "module": program.module,
        "op": fault.op,
        "line": f"{loaded.path}:{program.line}",
    }
    return [f"{k}: {getattr(found, k)}, not {v}" for k, v in right.items() if getattr(found, k) != v]


def alarms(loaded: Loaded) -> list[str]:
    """Who was stopped in a healthy program."""
    found = [(detail, loaded.watched(detail)) for detail in ("module", "auto", "op")]
    return [f"{detail}: {one.title()}" for detail, one in found if one is not None] + loaded.errors


def draws(count: int, *, planted: bool, folder: str, first: int = 0) -> Iterator[Loaded]:
    """Programs that are what they are meant to be: harmful as they stand, or not at all."""
    seed = first
    while count:
        loaded = attempt(seed, planted=planted, folder=folder)
        seed += 1
        if loaded is not None:
            count -= 1
            yield loaded


def attempt(seed: int, *, planted: bool, folder: str) -> Loaded | None:
    """The program of a seed, or None where it is not what it is meant to be: a run without any watch says so."""
    loaded = Loaded(draw(seed, planted=planted), folder)
    fault = loaded.program.fault
    if (
        fault is not None
        and Loaded(replace(loaded.program, source=_cured(loaded.program.source, fault)), folder, "cured").harmed()
    ):
        return None
    return loaded if loaded.harmed() == planted else None


def main(count: int) -> int:
    wrong: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for planted, look in ((True, mistakes), (False, alarms)):
            kind, tried = ("planted" if planted else "healthy"), 0
            for loaded in draws(count, planted=planted, folder=folder):
                tried += 1
                said = look(loaded)
                if said:
                    wrong[kind] += 1
                    fault = loaded.program.fault
                    print(
                        kind,
                        loaded.program.seed,
                        loaded.program.dtype,
                        fault.line if fault else "",
                        *said,
                        sep="\n    ",
                    )
            print(f"{kind}: {tried - wrong[kind]} of {tried} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
