"""Small training programs for the tests of hunt: each built twice, run plain and hunted, compared to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def bits(value: Any) -> Any:
    """A value in terms that compare by their bits: NaN equals itself, 0.0 is not -0.0, an absent gradient is None."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return str(value.dtype), tuple(value.shape), value.stride(), data
    if isinstance(value, float):
        return np.float64(value).tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, Mapping):
        return [(key if isinstance(key, (str, int)) else type(key).__name__, bits(v)) for key, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    if isinstance(value, (int, str, bytes, bool, type(None))):
        return value
    return type(value).__name__


class ConvNet(nn.Module):
    """Batch norm, dropout, and a counter of its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(216, 4),
        )
        self.calls = 0
        self.means: list[float] = []
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.body(x)
        self.means.append(float(out.detach().float().mean()))
        self.ema = self.ema * 0.9 + out.detach().float().mean(0) * 0.1  # a buffer that is replaced, not written
        return out.float().pow(2).mean()


class Recurrent(nn.Module):
    """A two-layer LSTM with dropout whose hidden state lives on from step to step in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # no float16 LSTM on a CPU
            out, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return self.head(out).float().pow(2).mean()


class Language(nn.Module):
    """A transformers model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=ids, labels=ids).loss
        return loss


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return Language(BertForMaskedLM(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Language(model)


def _ids() -> Tensor:
    return torch.randint(0, 40, (3, 7))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "bert": (bert, _ids),
    "conv": (ConvNet, lambda: torch.randn(4, 3, 8, 8)),
    "lstm": (Recurrent, lambda: torch.randn(4, 6, 5)),
    "llama": (llama, _ids),
}
RECIPES = ("adamw", "sgd", "scaler")
FAULTS = ("healthy", "loss", "update")


class Program:
    """A model, its optimizer, scheduler and scaler, and one step of training them; `fault` spoils the last step."""

    def __init__(self, model: str, recipe: str, fault: str = "healthy") -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        make, self.draw = MODELS[model]
        self.model = make()
        self.model.train()
        params = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if recipe == "sgd":
            self.optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 1.0 / (1 + i))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=recipe == "scaler")
        self.half = recipe == "scaler"
        self.fault = "healthy"
        self.planned = fault

    def spoil(self) -> None:
        self.fault = self.planned

    def step(self, x: Tensor) -> Tensor:
        noise = random.random() + float(np.random.rand())
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            loss: Tensor = self.model(x)
        loss = loss * (1 + 0.01 * noise)
        if self.fault == "loss":
            loss = loss * 1e30 * 1e30
        if self.fault == "update":
            for group in self.optimizer.param_groups:
                group["lr"] = float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.fault == "update")
        self.scaler.scale(self.model(x)).backward()  # gradients that stand when the step ends
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Everything that a later step could depend on."""
        model, optimizer = self.model, self.optimizer
        plain = (int, float, str, bool, type(None), list, tuple)
        return {
            "parameters": bits(dict(model.named_parameters())),
            "buffers": bits(dict(model.named_buffers())),
            "gradients": bits({name: p.grad for name, p in model.named_parameters()}),
            "flags": [(m.training, len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()],
            "attributes": [
                bits({k: v for k, v in vars(m).items() if isinstance(v, plain) and k != "_flat_weights"})
                for m in model.modules()
            ],
            "wants": [p.requires_grad for p in model.parameters()],
            "optimizer": bits(optimizer.state_dict()),
            "optimizer attributes": sorted(vars(optimizer)),
            "scheduler": bits({k: v for k, v in vars(self.scheduler).items() if k != "optimizer"}),
            "scaler": bits({k: v for k, v in vars(self.scaler).items() if k != "_per_optimizer_states"}),
            "random": bits([torch.get_rng_state(), random.getstate(), list(np.random.get_state())]),
        }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in a if a[key] != b[key]]
