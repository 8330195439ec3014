"""Lightning and Accelerate with tiny models, as their users run them."""

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .harness import Spans
from .installed import framework, needs
from .models import Net, batch, conv_net, mlp, squared


def _lightning(**options: Any) -> tuple[Any, Any, Any]:
    pl = needs("lightning.pytorch")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()

        def training_step(self, rows: Any, i: int) -> Tensor:
            x, y = rows
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, rows: Any, i: int) -> None:
            self.log("val", F.cross_entropy(self.net(rows[0]), rows[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=2, devices=1, **{**quiet, "enable_model_summary": False, **options})
    data = DataLoader(TensorDataset(batch(8, 3, 14, 14), torch.randint(3, (8,))), batch_size=2, shuffle=True)
    return Lit(), trainer, data


def _fit(watch: Spans, **options: Any) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, trainer, data = _lightning(**options)
        with watch(model):
            trainer.fit(model, data, data)
    return [dict(model.state_dict()), {k: v.item() for k, v in trainer.callback_metrics.items()}]


@framework()
def lightning_fit(watch: Spans) -> object:
    """Trainer.fit with validation."""
    return _fit(watch)


@framework()
def lightning_bf16_accum_clip(watch: Spans) -> object:
    """bfloat16 mixed precision, accumulation over two batches, clipping."""
    return _fit(watch, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=0.1)


@framework()
def lightning_summary(watch: Spans) -> object:
    """The model summary, anomaly detection and a sanity check."""
    return _fit(watch, enable_model_summary=True, detect_anomaly=True, num_sanity_val_steps=1)


@framework()
def lightning_checkpoint(watch: Spans) -> object:
    """A checkpoint is written while watched and read again."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, trainer, data = _lightning(default_root_dir=folder, enable_checkpointing=True)
        with watch(model):
            trainer.fit(model, data)
        (path,) = Path(folder).rglob("*.ckpt")
        saved = torch.load(path, weights_only=False)
    return [dict(model.state_dict()), saved["state_dict"], saved["optimizer_states"]]


def _accelerator(**options: Any) -> Any:
    acc = needs("accelerate")
    acc.state.AcceleratorState._reset_state(reset_partial_state=True)
    acc.state.GradientState._reset_state()
    return acc.Accelerator(cpu=True, **options)


def _accelerated(watch: Spans, **options: Any) -> object:
    accelerator = _accelerator(**options)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = DataLoader(TensorDataset(batch(8, 4), torch.randint(3, (8,))), batch_size=2, shuffle=True)
    ready, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    with watch(ready):
        for x, y in data:
            with accelerator.accumulate(ready):
                loss = F.cross_entropy(ready(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(ready.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    return [losses, dict(model.state_dict()), dict(accelerator.unwrap_model(ready).state_dict())]


@framework()
def acc_prepare(watch: Spans) -> object:
    """prepare, backward and clip by the Accelerator."""
    return _accelerated(watch)


@framework()
def acc_bf16_accumulate(watch: Spans) -> object:
    """The same in bfloat16, which wraps forward, with accumulation."""
    return _accelerated(watch, mixed_precision="bf16", gradient_accumulation_steps=2)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def _offloaded(watch: Spans, offload: Callable[[nn.Module, str], None]) -> object:
    model = mlp(4, 6, 6, 3).eval()
    with _folder() as folder:
        offload(model, folder)
        with watch(model), torch.no_grad():
            outs = [model(batch()) for _ in range(2)]
    return outs


@framework()
def acc_cpu_offload(watch: Spans) -> object:
    """Weights live elsewhere and are fetched for each layer's forward."""
    acc = needs("accelerate")
    return _offloaded(watch, lambda m, folder: acc.cpu_offload(m, execution_device=torch.device("cpu")))


@framework()
def acc_disk_offload(watch: Spans) -> object:
    """Weights live on disk as memory maps."""
    acc = needs("accelerate")
    return _offloaded(watch, lambda m, folder: acc.disk_offload(m, folder, execution_device=torch.device("cpu")))


@framework()
def acc_hook_added_under_watch(watch: Spans) -> object:
    """Accelerate puts its hooks on and takes them off while the model is watched."""
    acc = needs("accelerate")
    model = mlp(4, 6, 3)

    class Twice(acc.hooks.ModelHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    with watch(model):
        acc.hooks.add_hook_to_module(model[0], Twice())
        first = model(batch())
        acc.hooks.remove_hook_from_module(model[0])
        second = model(batch())
        (squared(first) + squared(second)).backward()
    return [first, second, model]
