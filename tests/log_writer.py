"""One run, given as steps, as every program would have logged it: what is read back has to be the run again."""

# ruff: noqa: E501  (lines of logs are as long as they are)

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanhunt.symptoms.steps import Step

DATE = "2024-05-01 12:00:00"
_CARRIED = ("loss", "grad_norm", "lr", "loss_scale")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one program writes.

    Attributes:
        record: the text of one record; its values come formatted by `shown`, None where the step has none.
        shown: of each quantity that the format prints its format spec; those that are missing are not printed.
        head, tail: what stands before and after all records.
        metric: name under which the validation loss is read back; None where the format has none.
        message: the text of a skipped step; None where the format has none.
        tells_before: the message tells the scale that overflowed.
        counts: there are no step numbers, so records count from 1.
        suffix: of the file name.
        between: what parts two records.
    """

    record: Callable[[int, Mapping[str, str]], str]
    shown: Mapping[str, str]
    head: str = ""
    tail: str = ""
    metric: str | None = None
    message: Callable[[float, float], str] | None = None
    tells_before: bool = True
    counts: bool = False
    suffix: str = ".log"
    between: str = ""

    def write(self, steps: Iterable[Step]) -> str:
        """The log of a run."""
        out = [self.head]
        first = True
        count = 0
        for step in steps:
            if step.loss is None:
                if self.message is not None and step.loss_scale is not None and step.loss_scale_after is not None:
                    out.append(self.message(step.loss_scale, step.loss_scale_after))
                continue
            count += 1
            out.append("" if first else self.between)
            first = False
            out.append(self.record(count if self.counts else step.step or 0, self._texts(step)))
        out.append(self.tail)
        return "".join(out)

    def expected(self, steps: Sequence[Step]) -> list[Step]:
        """What reading that log should give: the numbers as they were printed, and only those that were."""
        made: list[Step] = []
        count = 0
        last: int | None = None
        for step in steps:
            if step.loss is None:
                if self.message is not None and step.loss_scale is not None and step.loss_scale_after is not None:
                    made.append(
                        Step(
                            step=None if self.counts else last,
                            loss_scale=step.loss_scale if self.tells_before else None,
                            loss_scale_after=step.loss_scale_after,
                            skipped=True,
                        )
                    )
                continue
            count += 1
            last = count if self.counts else step.step
            texts = {name: float(text) for name, text in self._texts(step).items() if text}
            val = texts.pop("val_loss", None)
            lr = texts.pop("lr", None)
            metrics = {} if val is None or self.metric is None else {self.metric: val}
            made.append(Step(step=last, lr=() if lr is None else (lr,), metrics=metrics, **texts))  # type: ignore[arg-type]
        return made

    def _texts(self, step: Step) -> dict[str, str]:
        values: dict[str, float | None] = {name: getattr(step, name) for name in _CARRIED if name != "lr"}
        values["lr"] = step.lr[0] if step.lr else None
        values["val_loss"] = step.metrics.get("val_loss") if self.metric is not None else None
        return {name: "" if (v := values[name]) is None else format(v, spec) for name, spec in self.shown.items()}


def comparable(step: Step) -> dict[str, object]:
    """What a step says, but for the line and the message it was read from, in a form that NaN compares in."""
    said = dataclasses.replace(step, line=None, note=None).to_dict()
    if said.get("skipped") is False:
        del said["skipped"]
    return said


# ---- how each program prints


def _pairs(values: Mapping[str, str], names: Mapping[str, str], form: str, join: str) -> str:
    return join.join(form.format(names[name], text) for name, text in values.items() if text and name in names)


def _lines(
    names: Mapping[str, str], form: str, join: str, head: str, tail: str = "\n"
) -> Callable[[int, Mapping[str, str]], str]:
    def record(step: int, values: Mapping[str, str]) -> str:
        return head.format(step=step) + _pairs(values, names, form, join) + tail

    return record


def _json(values: Mapping[str, str], names: Mapping[str, str], **more: object) -> str:
    said: dict[str, object] = dict(more)
    said.update({names[name]: float(text) for name, text in values.items() if text and name in names})
    return json.dumps(said)


def _strings(values: Mapping[str, str], names: Mapping[str, str], **more: object) -> str:
    return json.dumps({**more, **{names[name]: text for name, text in values.items() if text and name in names}})


def _dict(values: Mapping[str, str], names: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"'{names[n]}': {t}" for n, t in values.items() if t and n in names) + ", 'epoch': 0.37}\n"


def _row(step: int, values: Mapping[str, str], join: str = ",") -> str:
    return join.join([str(step), *values.values()]) + "\n"


def _fairseq_valid(values: Mapping[str, str], step: int) -> str:
    if not values.get("val_loss"):
        return ""
    return f"{DATE} | INFO | valid | epoch 001 | valid on 'valid' subset | loss {values['val_loss']} | num_updates {step}\n"


def _nanogpt(step: int, values: Mapping[str, str]) -> str:
    line = f"iter {step}: loss {values['loss']}, time 1042.77ms, mfu 16.13%\n"
    if values.get("val_loss"):
        line = f"step {step}: train loss {values['loss']}, val loss {values['val_loss']}\n" + line
    return line


def _megatron(step: int, values: Mapping[str, str]) -> str:
    names = {"lr": "learning rate", "loss": "lm loss", "loss_scale": "loss scale", "grad_norm": "grad norm"}
    line = f" iteration {step:8d}/  500000 | consumed samples: {step * 256:12d} | elapsed time per iteration (ms): 1234.5 | "
    line += "".join(f"{names[n]}: {values[n]} | " for n in ("lr", "loss", "loss_scale", "grad_norm") if values.get(n))
    line += "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    if values.get("val_loss"):
        rule = "-" * 80 + "\n"
        line += f"{rule} validation loss at iteration {step} | lm loss value: {values['val_loss']} | \n{rule}"
    return line


def _lightning_csv(step: int, values: Mapping[str, str]) -> str:
    rows = f"{values.get('lr', '')},0,{step},,,\n" if values.get("lr") else ""
    rows += f",0,{step},{values['loss']},{values.get('grad_norm', '')},\n"
    return rows + (f",0,{step},,,{values['val_loss']}\n" if values.get("val_loss") else "")


def _olmo(step: int, values: Mapping[str, str]) -> str:
    names = {"grad_norm": "optim/total_grad_norm", "loss": "train/CrossEntropyLoss", "lr": "optim/learning_rate_group0"}
    lines = [f"{names[n]}={values[n]}" for n in ("grad_norm", "loss", "lr") if values.get(n)]
    return f"[step={step}/739328]\n" + "".join(
        f"    {line}\n" for line in [*lines, "throughput/total_tokens=20,971,520"]
    )


def _bar(step: int, values: Mapping[str, str]) -> str:
    filled = "█" * (step % 10) + " " * (10 - step % 10)
    more = ", ".join(f"{n}={values[v]}" for n, v in (("train_loss", "loss"), ("val_loss", "val_loss")) if values.get(v))
    return f"\rEpoch 0:  {step % 100}%|{filled}| {step}/9999999 [00:10<01:30, 10.00it/s, v_num=0, {more}]"


def _keras(step: int, values: Mapping[str, str]) -> str:
    val = f" - val_loss: {values['val_loss']}" if values.get("val_loss") else ""
    ramp = "\b" * 20 + f"\r100/100 [{'=' * 30}] - 5s 50ms/step - loss: {values['loss']}{val}\n"
    return f"Epoch {step}/900\n{ramp}"


def _tqdm_dict(step: int, values: Mapping[str, str]) -> str:
    bar = f"\r  {step % 100}%|{'#' * (step % 10)}         | {step * 10}/400 [05:12<1:21:56, 13.24s/it]"
    return f"{bar}\n{_dict(values, _HF)}{bar}\n"


_HF = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
_PLAIN = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr", "loss_scale": "loss_scale"}
_VAL = {**_PLAIN, "val_loss": "val_loss"}
_FULL = {"loss": ".6f", "grad_norm": ".6g", "lr": ".4e", "loss_scale": ".1f"}
_FULL_VAL = {**_FULL, "val_loss": ".6f"}
_FAIRSEQ = {"lr": "lr", "grad_norm": "gnorm", "loss_scale": "loss_scale"}
_FAIRSEQ_SHOWN = {"loss": ".3f", "lr": ".6g", "grad_norm": ".3f", "loss_scale": ".3f"}
_STATE = {**_HF, "val_loss": "eval_loss"}


def _simple(step: int, values: Mapping[str, str]) -> str:
    body = f"loss={values['loss']}, ppl=1756.27, wps=38001, ups=1, num_updates={step}, "
    return f"| epoch 003:   100 / 2210 {body}{_pairs(values, _FAIRSEQ, '{}={}', ', ')}, clip=0.000, wall=2921\n"


def _inner(step: int, values: Mapping[str, str]) -> str:
    body = f"loss={values['loss']}, ppl=4389.6, wps=11111, ups=3.1, num_updates={step}, "
    line = f"{DATE} | INFO | train_inner | epoch 001:  {step} / 999999 {body}{_pairs(values, _FAIRSEQ, '{}={}', ', ')}"
    return f"{line}, train_wall=32, wall=40\n{_fairseq_valid(values, step)}"


def _deepspeed(before: float, after: float) -> str:
    said = f"Attempted loss scale: {before:g}, reducing to {after:g}"
    return f"[2024-02-19 04:40:12,440] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. {said}\n"


def _apex(before: float, after: float) -> str:
    return f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {after}\n"


def _monitor(step: int, values: Mapping[str, str]) -> str:
    texts = {name: float(text) for name, text in values.items() if text}
    val, lr = texts.pop("val_loss", None), texts.pop("lr", None)
    made = Step(
        step=step,
        lr=() if lr is None else (lr,),
        metrics={} if val is None else {"val_loss": val},
        **texts,  # type: ignore[arg-type]
    )
    return json.dumps(made.to_dict()) + "\n"


FORMATS: dict[str, Format] = {
    "plain": Format(
        record=_lines(_VAL, "{} {}", " | ", "step {step} | "),
        shown=_FULL_VAL,
        metric="val_loss",
        message=_apex,
        tells_before=False,
    ),
    "key=value": Format(
        record=_lines(_VAL, "{}={}", " ", f"{DATE},123 INFO host-7 train.py:88 step={{step}} ", " time=0.21s\n"),
        shown=_FULL_VAL,
        metric="val_loss",
        message=_deepspeed,
    ),
    "loguru": Format(
        record=_lines(_PLAIN, "{}: {}", ", ", f"{DATE}.123 | INFO     | __main__:step:123 - iteration: {{step}}, "),
        shown=_FULL,
    ),
    "srun": Format(record=_lines(_PLAIN, "{}={}", " ", "0: [rank0] step={step} "), shown=_FULL),
    "csv": Format(
        record=_row,
        shown=_FULL_VAL,
        head="step,loss,grad_norm,lr,loss_scale,val_loss\n",
        metric="val_loss",
        suffix=".csv",
    ),
    "tsv": Format(
        record=lambda step, values: _row(step, values, "\t"),
        shown=_FULL,
        head="iteration\ttrain_loss\tgnorm\tlearning_rate\tscale\n",
        suffix=".tsv",
    ),
    "semicolons": Format(
        record=lambda step, values: _row(step, values, ";"),
        shown=_FULL,
        head='"step";"loss";"grad norm";"lr";"loss scale"\n',
        suffix=".csv",
    ),
    "Keras CSVLogger": Format(
        record=lambda step, values: f"{step},0.5,{values['loss']},{values['val_loss']}\n",
        shown={"loss": ".17g", "val_loss": ".17g"},
        head="epoch,accuracy,loss,val_loss\n",
        metric="val_loss",
        suffix=".csv",
    ),
    "Lightning metrics.csv": Format(
        record=_lightning_csv,
        shown={"loss": ".9g", "grad_norm": ".9g", "lr": ".9g", "val_loss": ".9g"},
        head="lr-Adam,epoch,step,train_loss_step,grad_norm,val_loss\n",
        metric="val_loss",
        suffix=".csv",
    ),
    "ultralytics": Format(
        record=lambda step, values: f"{step:>23},{values['loss']:>23},{values['val_loss']:>23},{values['lr']:>23}\n",
        shown={"loss": ".5g", "val_loss": ".5g", "lr": ".5g"},
        head=f"{'epoch':>23},{'train/box_loss':>23},{'val/box_loss':>23},{'lr/pg0':>23}\n",
        metric="val/box_loss",
        suffix=".csv",
    ),
    "JSON lines": Format(
        record=lambda step, values: _json(values, _VAL, step=step) + "\n",
        shown=dict.fromkeys(_FULL_VAL, ".9g"),
        metric="val_loss",
        suffix=".jsonl",
    ),
    "nested JSON lines": Format(
        record=lambda step, values: (
            json.dumps(
                {
                    "time": DATE,
                    "step": step,
                    "train": json.loads(_json(values, _PLAIN)),
                    "valid": json.loads(_json(values, {"val_loss": "loss"})),
                }
            )
            + "\n"
        ),
        shown=dict.fromkeys(_FULL_VAL, ".9g"),
        metric="valid/loss",
        suffix=".jsonl",
    ),
    "W&B history": Format(
        record=lambda step, values: (
            _json(
                values,
                {
                    "loss": "train/loss",
                    "grad_norm": "train/grad_norm",
                    "lr": "train/learning_rate",
                    "val_loss": "eval/loss",
                },
                _step=step,
                _runtime=12.5,
                _timestamp=1714560000.25,
            )
            + "\n"
        ),
        shown={"loss": ".9g", "grad_norm": ".9g", "lr": ".9g", "val_loss": ".9g"},
        metric="eval/loss",
        suffix=".jsonl",
    ),
    "mmdet json": Format(
        record=lambda step, values: (
            _json(
                values,
                {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr"},
                mode="train",
                epoch=1,
                iter=step,
                memory=3781,
            )
            + "\n"
        ),
        shown={"loss": ".5g", "grad_norm": ".5g", "lr": ".5g"},
        head='{"env_info": "Python: 3.10", "seed": 1}\n',
        suffix=".json",
    ),
    "fairseq simple, old": Format(
        record=_simple,
        shown=_FAIRSEQ_SHOWN,
        message=lambda before, after: f"| WARNING: overflow detected, setting loss scale to: {after:g}\n",
        tells_before=False,
    ),
    "fairseq simple": Format(
        record=_inner,
        shown={**_FAIRSEQ_SHOWN, "val_loss": ".3f"},
        metric="val loss",
        message=lambda before, after: (
            f"{DATE} | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {after:g}\n"
        ),
        tells_before=False,
    ),
    "fairseq json": Format(
        record=lambda step, values: (
            f"{DATE} | INFO | train_inner | "
            + _strings(values, {"loss": "loss", **_FAIRSEQ}, epoch=1, update=0.123, num_updates=str(step))
            + "\n"
        ),
        shown=_FAIRSEQ_SHOWN,
    ),
    "transformers dicts": Format(
        record=lambda step, values: (
            _dict(values, _HF)
            + (
                f"{{'eval_loss': {values['val_loss']}, 'eval_runtime': 41.2207, 'epoch': 0.37}}\n"
                if values["val_loss"]
                else ""
            )
        ),
        shown={"loss": ".4f", "grad_norm": ".10g", "lr": ".12g", "val_loss": ".4f"},
        metric="eval_loss",
        counts=True,
        message=_deepspeed,
        tail="{'train_runtime': 123.4, 'train_samples_per_second': 12.2, 'train_loss': 2.2, 'epoch': 3.0}\n",
    ),
    "transformers dicts of words": Format(
        record=lambda step, values: str({_HF[n]: t for n, t in values.items() if t} | {"epoch": "0.37"}) + "\n",
        shown={"loss": ".4g", "grad_norm": ".4g", "lr": ".4g"},
        counts=True,
    ),
    "transformers dicts and bars": Format(
        record=_tqdm_dict,
        shown={"loss": ".4f", "grad_norm": ".10g", "lr": ".12g"},
        counts=True,
    ),
    "trainer_state.json": Format(
        record=lambda step, values: "    " + _json(values, _STATE, epoch=0.5, step=step).replace(", ", ",\n      "),
        shown={"loss": ".9g", "grad_norm": ".9g", "lr": ".9g", "val_loss": ".9g"},
        metric="eval_loss",
        between=",\n",
        head='{\n  "best_metric": null,\n  "global_step": 500,\n  "log_history": [\n',
        tail='\n  ],\n  "max_steps": 500\n}\n',
        suffix=".json",
    ),
    "trainer_state.json in one line": Format(
        record=lambda step, values: _json(values, _STATE, epoch=0.5, step=step),
        shown={"loss": ".9g", "grad_norm": ".9g", "lr": ".9g", "val_loss": ".9g"},
        metric="eval_loss",
        between=", ",
        head='{"best_metric": null, "log_history": [',
        tail="]}",
        suffix=".json",
    ),
    "Megatron": Format(
        record=_megatron,
        shown={"loss": ".6E", "grad_norm": ".3f", "lr": ".6E", "loss_scale": ".1f", "val_loss": ".6E"},
        metric="val lm loss value",
    ),
    "nanoGPT": Format(record=_nanogpt, shown={"loss": ".4f", "val_loss": ".4f"}, metric="val loss"),
    "detectron2": Format(
        record=_lines(
            {"loss": "total_loss", "lr": "lr"},
            "{}: {}",
            "  ",
            "[05/14 20:13:00 d2.utils.events]:  eta: 5:41:39  iter: {step}  ",
            "  max_mem: 3782M\n",
        ),
        shown={"loss": ".4g", "lr": ".5g"},
    ),
    "mmdet": Format(
        record=_lines(
            {"lr": "lr", "loss": "loss", "grad_norm": "grad_norm"},
            "{}: {}",
            ", ",
            f"{DATE},475 - mmdet - INFO - Epoch [1][{{step}}/999999]\t",
        ),
        shown={"lr": ".3e", "loss": ".4f", "grad_norm": ".4f"},
    ),
    "mmengine": Format(
        record=_lines(
            {"lr": "lr", "loss": "loss", "grad_norm": "grad_norm"},
            "{}: {}",
            "  ",
            "08/03 22:09:24 - mmengine - INFO - Epoch(train)  [1][ {step}/999999]  ",
        ),
        shown={"lr": ".4e", "grad_norm": ".4f", "loss": ".4f"},
    ),
    "PyTorch ImageNet example": Format(
        record=lambda step, v: (
            f"Epoch: [0][{step:>6}/999999]\tTime  0.521 ( 1.323)\tData  0.000 ( 0.5)\tLoss {v['loss']} (7.0e+00)\tAcc@1   0.39 (  0.12)\n"
        ),
        shown={"loss": ".4e"},
        message=_apex,
        tells_before=False,
    ),
    "DeiT": Format(
        record=lambda step, v: (
            f"Epoch: [0]  [{step:>6}/999999]  eta: 1:23:45  lr: {v['lr']}  loss: {v['loss']} (6.95)  time: 4.0  max mem: 6543\n"
        ),
        shown={"lr": ".6f", "loss": ".4f"},
    ),
    "Swin": Format(
        record=lambda step, v: (
            f"[2021-04-10 10:00:00 swin] (main.py 200): INFO Train: [0/300][{step}/999999]\teta 1:02:03 lr {v['lr']}\t"
            f"time 0.5 (0.6)\tloss {v['loss']} (6.95)\tgrad_norm {v['grad_norm']} (1.6)\tloss_scale {v['loss_scale']} (4.0)\tmem 9000MB\n"
        ),
        shown={"lr": ".6f", "loss": ".4f", "grad_norm": ".4f", "loss_scale": ".4f"},
    ),
    "Keras bars": Format(record=_keras, shown={"loss": ".4f", "val_loss": ".4f"}, metric="val_loss", counts=True),
    "Lightning bars": Format(record=_bar, shown={"loss": ".3g", "val_loss": ".3g"}, metric="val_loss"),
    "char-rnn": Format(
        record=lambda step, v: (
            f"{step}/999999 (epoch 4.532), train_loss = {v['loss']}, grad/param norm = {v['grad_norm']}, time/batch = 0.1784s\t\n"
        ),
        shown={"loss": ".8f", "grad_norm": ".4e"},
    ),
    "torchtitan": Format(
        record=_lines(
            {"loss": "loss", "grad_norm": "grad_norm"},
            "\x1b[32m{}: {:>8}\x1b[0m",
            "  ",
            f"[rank0]:[titan] {DATE},123 - root - INFO - step: {{step:>2}}  ",
            "  memory: 20.12GiB(42.35%)  tps: 1,234  mfu: 3.95%\n",
        ),
        shown={"loss": ".5f", "grad_norm": ".4f"},
    ),
    "torchtune": Format(
        record=_lines(
            {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm"},
            "{}:{}",
            " ",
            "Step {step} | ",
            " tokens_per_second_per_gpu:123.4\n",
        ),
        shown={"loss": ".17g", "lr": ".17g", "grad_norm": ".17g"},
    ),
    "OLMo": Format(record=_olmo, shown={"loss": ".4g", "grad_norm": ".4g", "lr": ".4g"}),
    "clu": Format(
        record=_lines(
            {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "learning_rate"},
            "{}={}",
            ", ",
            "I0101 00:00:00.000000 123456 logging_writer.py:48] [{step}] ",
        ),
        shown={"loss": ".6g", "grad_norm": ".6g", "lr": ".6g"},
    ),
    "history": Format(
        record=lambda step, values: _json(values, {"loss": "train_loss", "val_loss": "val_loss"}, epoch=step),
        shown={"loss": ".9g", "val_loss": ".9g"},
        metric="val_loss",
        between=", ",
        head="[",
        tail="]",
        suffix=".json",
    ),
    "nanhunt steps": Format(
        record=_monitor,
        shown=dict.fromkeys(_FULL_VAL, ".17g"),
        head='{"nanhunt_steps": 1}\n',
        metric="val_loss",
        suffix=".jsonl",
    ),
}


def example(count: int = 40, *, bad: bool = False, skips: bool = True) -> list[Step]:
    """A run of some steps: a validation now and then, some skipped steps, at its end a NaN when `bad`."""
    steps: list[Step] = []
    scale = 65536.0
    for at in range(1, count + 1):
        gone = bad and at > count - 4
        loss = math.nan if gone else 3.0 / math.sqrt(at) + 0.01 * math.sin(at)
        steps.append(
            Step(
                step=at * 10,
                loss=loss,
                grad_norm=math.nan if gone else 1.5 + math.cos(at) / 3,
                lr=(1e-3 * at / count,),
                loss_scale=scale,
                metrics={"val_loss": loss * 1.1} if at % 5 == 0 else {},
            )
        )
        if skips and at % 13 == 7:
            steps.append(Step(step=at * 10, loss_scale=scale, loss_scale_after=scale / 2, skipped=True))
            scale /= 2
    return steps
