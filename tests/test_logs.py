"""Logs of every format are read to the exact numbers: lines as programs print them, a run written in each way."""

# ruff: noqa: E501  (lines of logs are as long as they are)

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import pathlib
import sys
from typing import Any

import pytest

import nanhunt
from nanhunt.errors import UsageError
from nanhunt.logs.names import meaning
from nanhunt.logs.reader import Reader
from nanhunt.logs.reading import read_log, read_ranks
from nanhunt.logs.spellings import number
from nanhunt.symptoms.steps import Step

from .log_writer import FORMATS, comparable, example

NAN, INF = "nan", "inf"  # as `Step.to_dict` has them


def steps_of(path: pathlib.Path | str, **options: Any) -> list[Step]:
    return list(Reader(str(path), [str(path)], **options).steps())


def read(tmp_path: pathlib.Path, text: str, name: str = "run.log") -> list[dict[str, Any]]:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return [comparable(step) for step in steps_of(path)]


# ---- a run in every format


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "nan"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_run_written_in_any_format_is_read_back_as_it_was(name: str, bad: bool, tmp_path: pathlib.Path) -> None:
    form, run = FORMATS[name], example(bad=bad)
    got = read(tmp_path, form.write(run), "run" + form.suffix)
    assert got == [comparable(step) for step in form.expected(run)]


def test_the_writer_writes_what_it_says_it_does() -> None:
    run = example(bad=True)
    want = FORMATS["plain"].expected(run)
    assert [step.step for step in want if step.loss is not None] == [step.step for step in run if step.loss is not None]
    assert math.isnan(want[-1].loss or 0.0) and sum(step.skipped is True for step in want) == 3
    assert "step 10 | loss 3.008415 | grad_norm" in FORMATS["plain"].write(run)


@pytest.mark.parametrize("name", ["key=value", "csv", "fairseq simple", "transformers dicts", "nanhunt steps"])
@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bzip2", "xz"])
def test_a_packed_log_reads_as_the_plain_one(name: str, pack: Any, tmp_path: pathlib.Path) -> None:
    form, run = FORMATS[name], example()
    path = tmp_path / "run.log.packed"
    path.write_bytes(pack(form.write(run).encode()))
    assert [comparable(step) for step in steps_of(path)] == [comparable(step) for step in form.expected(run)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_log_in_another_encoding_reads_as_the_plain_one(encoding: str, tmp_path: pathlib.Path) -> None:
    form, run = FORMATS["csv"], example()
    path = tmp_path / "run.csv"
    path.write_bytes(form.write(run).encode(encoding))
    assert [comparable(step) for step in steps_of(path)] == [comparable(step) for step in form.expected(run)]


# ---- lines as programs print them

SAMPLES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "the example of the method": (
        "step 1200 | loss 2.31 | grad_norm 0.87 | loss_scale 65536.0\n"
        "step 1201 | loss 3.02 | grad_norm 1.24 | loss_scale 65536.0\n"
        "step 1202 | loss nan | grad_norm nan | loss_scale 32768.0\n"
        "step 1203 | loss nan | grad_norm nan | loss_scale 16384.0\n",
        [
            {"step": 1200, "loss": 2.31, "grad_norm": 0.87, "loss_scale": 65536.0},
            {"step": 1201, "loss": 3.02, "grad_norm": 1.24, "loss_scale": 65536.0},
            {"step": 1202, "loss": NAN, "grad_norm": NAN, "loss_scale": 32768.0},
            {"step": 1203, "loss": NAN, "grad_norm": NAN, "loss_scale": 16384.0},
        ],
    ),
    "spellings of NaN": (
        "iter 1 loss -nan(ind) gnorm 1.#QNAN\n"
        "iter 2 loss -1.#IND gnorm 1.#INF\n"
        "iter 3 loss tensor(nan, device='cuda:0', grad_fn=<NllLossBackward0>) gnorm Infinity\n"
        "iter 4 loss array(nan) gnorm -Infinity\n"
        "iter 5 loss None gnorm NaN\n"
        "iter 6 loss: tensor(2.5, device='cuda:0') gnorm: np.float32(1.5)\n"
        "iter 1,007 loss: 1,234.5, gnorm: 2.3K\n",
        [
            {"step": 1, "loss": NAN, "grad_norm": NAN},
            {"step": 2, "loss": NAN, "grad_norm": INF},
            {"step": 3, "loss": NAN, "grad_norm": INF},
            {"step": 4, "loss": NAN, "grad_norm": "-inf"},
            {"step": 5, "grad_norm": NAN},
            {"step": 6, "loss": 2.5, "grad_norm": 1.5},
            {"step": 1007, "loss": 1234.5, "grad_norm": 2300.0},
        ],
    ),
    "dates, hosts and line numbers are no steps": (
        "2024-05-01 12:00:00.123 | INFO     | __main__:step:123 - step: 10, loss: 2.3456\n"
        "[2024-05-01 12:00:01,123] [INFO] [loss.py:45:step] [Rank 0] step=20, loss=2.25\n"
        "Nov 30 01:03:50 epoch-7 train[123]: step 30 loss 2.125\n"
        "I0530 12:00:00.123456 140735 train.py:123] step = 40, loss = 2.0 (3.210 sec)\n"
        "05/14 20:13:00 step 50 loss 1.5\n",
        [{"step": s, "loss": v} for s, v in ((10, 2.3456), (20, 2.25), (30, 2.125), (40, 2.0), (50, 1.5))],
    ),
    "Lightning's metrics.csv, several rows a step": (
        "epoch,lr-Adam,step,train_loss_epoch,train_loss_step,val_loss\n"
        ",0.001,9,,,\n0,,9,,2.5,\n,0.001,19,,,\n0,,19,,2.25,\n0,,24,,,2.4\n0,,24,2.3,,\n,0.001,29,,,\n1,,29,,2.0,\n",
        [
            {"step": 9, "loss": 2.5, "lr": [0.001]},
            {"step": 19, "loss": 2.25, "lr": [0.001]},
            {"step": 24, "metrics": {"val_loss": 2.4}},
            {"step": 29, "loss": 2.0, "lr": [0.001]},
        ],
    ),
    "decimal commas": (
        "Schritt 1: Loss = 2,7180, Lernrate = 0,001\nSchritt 2: Loss = 0,639\nSchritt 3: Loss = 1,234, gnorm: 0,5\n",
        [{"step": 1, "loss": 2.718}, {"step": 2, "loss": 0.639}, {"step": 3, "loss": 1.234, "grad_norm": 0.5}],
    ),
    "commas that part thousands, or values": (
        "step 1: loss = 1,234\nstep 2: loss = 2,345, lr = [1, 2]\nstep 3,loss 7\n",
        [{"step": 1, "loss": 1234.0}, {"step": 2, "loss": 2345.0, "lr": [1.0, 2.0]}, {"step": 3, "loss": 7.0}],
    ),
    "Marian": (
        "[2021-03-01 12:00:00] Ep. 1 : Up. 1000 : Sen. 50,000 : Cost 10.5 * 1,234,567 @ 2,345 after 12,345,678 : Time 33.1s : 31231.02 words/s : gNorm 1.25 : L.r. 3.0000e-04\n"
        "[2021-03-01 12:00:09] Ep. 1 : Up. 2000 : Sen. 100,000 : Cost nan * 1,234,567 @ 2,345 after 12,345,678 : Time 33.1s : 31231.02 words/s : gNorm nan : L.r. 3.0000e-04\n",
        [
            {"step": 1000, "loss": 10.5, "grad_norm": 1.25, "lr": [0.0003]},
            {"step": 2000, "loss": NAN, "grad_norm": NAN, "lr": [0.0003]},
        ],
    ),
    "boosters": (
        "[10]\ttraining's binary_logloss: 0.5\tvalid_1's binary_logloss: 0.625\n"
        "[20]\ttraining's binary_logloss: 0.25\tvalid_1's binary_logloss: 0.5\n",
        [
            {"step": 10, "loss": 0.5, "metrics": {"valid_1 binary_logloss": 0.625}},
            {"step": 20, "loss": 0.25, "metrics": {"valid_1 binary_logloss": 0.5}},
        ],
    ),
    "stable-baselines, a quantity on each line": (
        "".join(
            "-----------------------------------------\n| rollout/                |             |\n"
            f"|    ep_rew_mean          | {20 + i}          |\n| time/                   |             |\n"
            f"|    iterations           | {i}           |\n| train/                  |             |\n"
            "|    approx_kl            | 0.0123      |\n|    entropy_loss         | -0.5        |\n"
            "|    learning_rate        | 0.0003      |\n|    loss                 | 12.5        |\n"
            "|    policy_gradient_loss | -0.25       |\n|    value_loss           | 40.5        |\n"
            "-----------------------------------------\n"
            for i in (1, 2, 3)
        ),
        [
            {
                "step": i,
                "loss": 12.5,
                "lr": [0.0003],
                "losses": {"entropy_loss": -0.5, "policy_gradient_loss": -0.25, "value_loss": 40.5},
            }
            for i in (1, 2, 3)
        ],
    ),
    "wide signs, and Chinese words": (
        "step：100，loss：2.5，学习率：0.001\n步数: 200, 训练损失: 2.25，验证损失：nan\n",  # noqa: RUF001
        [
            {"step": 100, "loss": 2.5, "lr": [0.001]},
            {"step": 200, "loss": 2.25, "metrics": {"val loss": NAN}},
        ],
    ),
    "a loss that is printed as it is": (
        "tensor(0.5000, grad_fn=<NllLossBackward0>)\ntensor(4.1e+04, device='cuda:0', grad_fn=<MseLossBackward0>)\n"
        "tensor(nan, device='cuda:0', grad_fn=<MseLossBackward0>)\n",
        [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 41000.0}, {"step": 3, "loss": NAN}],
    ),
    "a reward beside the loss": (
        "{'loss': 0.001, 'grad_norm': 0.5, 'reward': 1.5, 'reward_std': 0.25, 'kl': 0.01, 'epoch': 0.1}\n",
        [{"step": 1, "loss": 0.001, "grad_norm": 0.5, "metrics": {"reward": 1.5}}],
    ),
    "a notebook's table": (
        "Step\tTraining Loss\tValidation Loss\n500\t2.31\t2.4\n1000\t1.9\tNo log\n1500\t0.000000\tnan\n",
        [
            {"step": 500, "loss": 2.31, "metrics": {"Validation Loss": 2.4}},
            {"step": 1000, "loss": 1.9},
            {"step": 1500, "loss": 0.0, "metrics": {"Validation Loss": NAN}},
        ],
    ),
    "a table with a column that names the set": (
        "epoch,phase,loss,accuracy\n1,train,0.9,0.5\n1,val,0.8,0.6\n2,train,0.7,0.7\n2,val,nan,0.1\n",
        [
            {"step": 1, "loss": 0.9, "metrics": {"val loss": 0.8, "val accuracy": 0.6}},
            {"step": 2, "loss": 0.7, "metrics": {"val loss": NAN, "val accuracy": 0.1}},
        ],
    ),
    "a CSV that W&B exports": (
        '"Step","eager-sun-7 - train/loss","eager-sun-7 - train/loss__MIN","eager-sun-7 - train/loss__MAX"\n'
        '"10","2.5","2.5","2.5"\n"20","NaN","NaN","NaN"\n',
        [{"step": 10, "loss": 2.5}, {"step": 20, "loss": NAN}],
    ),
    "fairseq json with its means": (
        '2020-08-07 12:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.123, "loss": "10.1", "nll_loss": "9.8", '
        '"ppl": "894.1", "num_updates": "100", "lr": "0.00005", "gnorm": "2.5", "loss_scale": "128"}\n'
        "2020-08-07 12:00:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
        "setting loss scale to: 64.0\n"
        '2020-08-07 12:01:10 | INFO | valid | {"epoch": 1, "valid_loss": "8.9", "valid_num_updates": "100"}\n'
        '2020-08-07 12:01:10 | INFO | train | {"epoch": 1, "train_loss": "9.6", "train_num_updates": "100", "train_gnorm": "2.3"}\n',
        [
            {
                "step": 100,
                "loss": 10.1,
                "losses": {"nll_loss": 9.8},
                "grad_norm": 2.5,
                "lr": [5e-05],
                "loss_scale": 128.0,
            },
            {"step": 100, "loss_scale_after": 64.0, "skipped": True},
            {"step": 100, "metrics": {"valid_loss": 8.9}},
        ],
    ),
    "fairseq simple with its means": (
        "2021-01-05 10:00:30 | INFO | train_inner | epoch 001:    200 / 1121 loss=10.302, ppl=1389.6, num_updates=200, "
        "lr=2.5e-05, gnorm=1.712, loss_scale=128, wall=40\n"
        "2021-01-05 10:05:30 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9.5 | ppl 550 | num_updates 200\n"
        "2021-01-05 10:05:31 | INFO | fairseq_cli.train | end of epoch 1 (average epoch stats below)\n"
        "2021-01-05 10:05:31 | INFO | train | epoch 001 | loss 11.1 | ppl 2200 | num_updates 200 | lr 2.5e-05 | gnorm 2.2\n",
        [
            {
                "step": 200,
                "loss": 10.302,
                "grad_norm": 1.712,
                "lr": [2.5e-05],
                "loss_scale": 128.0,
                "metrics": {"val loss": 9.5, "val ppl": 550.0},
            }
        ],
    ),
    "DeepSpeed": (
        "[2023-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.0001, 0.0002], "
        "mom=[[0.9, 0.999], [0.9, 0.999]]\n"
        "[2023-05-01 10:00:02,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=3, lr=[0.0001, 0.0002], mom=[0.9]\n"
        "[2021-05-01 10:00:02,123] [INFO] [stage2.py:1467:step] [deepscale] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 4294967296, reducing to 2147483648.0\n"
        "[2021-05-01 10:00:02,123] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1\n"
        "[2021-05-01 10:00:02,123] [INFO] [unfused_optimizer.py:275:_update_scale] Grad overflow on iteration: 21\n"
        "[2021-05-01 10:00:02,123] [INFO] [unfused_optimizer.py:276:_update_scale] Reducing dynamic loss scale from 65536.0 to 32768.0\n"
        "[2021-05-01 10:00:02,123] [INFO] [fused_optimizer.py:275] [deepspeed] fp16 dynamic loss scale overflow! "
        "Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0\n"
        "[2021-05-01 10:00:02,123] [INFO] [fused_optimizer.py:390:_update_scale] No Grad overflow for 1000 iterations\n"
        "[2021-05-01 10:00:02,123] [INFO] [fused_optimizer.py:391:_update_scale] Increasing dynamic loss scale from 16384.0 to 32768.0\n",
        [
            {"step": 10, "lr": [0.0001, 0.0002]},
            {"step": 20, "lr": [0.0001, 0.0002], "skipped": True},
            {"step": 20, "loss_scale": 4294967296.0, "loss_scale_after": 2147483648.0, "skipped": True},
            {"step": 20, "loss_scale": 65536.0, "skipped": True},
            {"step": 21, "skipped": True},
            {"step": 21, "loss_scale": 65536.0, "loss_scale_after": 32768.0, "skipped": True},
            {"step": 21, "loss_scale": 32768.0, "loss_scale_after": 16384.0, "skipped": True},
            {"step": 21, "loss_scale": 16384.0, "loss_scale_after": 32768.0},
        ],
    ),
    "scalers of other programs": (
        "OVERFLOW! Skipping step. Attempted loss scale: 65536.0, reducing to 32768.0\n"
        "Found inf or nan, current scale is: 1024.0, decrease to: 1024.0*0.5\n"
        "Check overflow, downscale loss scale 512.0 to 256.0\n"
        "AMP: decreasing loss scale to 16384.000000\n"
        "Overflow occurs, the loss scale is adjusted to 128\n"
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8.165126103939127e-202\n",
        [
            {"step": None, "loss_scale": 65536.0, "loss_scale_after": 32768.0, "skipped": True},
            {"step": None, "loss_scale": 1024.0, "loss_scale_after": 512.0, "skipped": True},
            {"step": None, "loss_scale": 512.0, "loss_scale_after": 256.0, "skipped": True},
            {"step": None, "loss_scale_after": 16384.0, "skipped": True},
            {"step": None, "loss_scale_after": 128.0, "skipped": True},
            {"step": None, "loss_scale_after": 8.165126103939127e-202, "skipped": True},
        ],
    ),
    "last words": (
        "step 7 loss 2.0\n"
        "FloatingPointError: Minimum loss scale reached (0.0001).\n"
        "FloatingPointError: Loss became infinite or NaN at iteration=9!\n"
        "Loss is inf, stopping training\n"
        "loss is exploding, aborting.\n"
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n"
        "Batch 10: Invalid loss, terminating training\n"
        "ValueError: nan loss encountered\n",
        [
            {"step": 7, "loss": 2.0},
            {"step": 7},
            {"step": 9, "loss": NAN},
            {"step": 9, "loss": INF},
            {"step": 9},
            {"step": 9},
            {"step": 9, "loss": NAN},
            {"step": 9, "loss": NAN},
        ],
    ),
    "Megatron": (
        " iteration      100/  500000 | consumed samples:        25600 | elapsed time per iteration (ms): 1234.5 | "
        "learning rate: 1.500E-04 | global batch size:   256 | lm loss: 9.125000E+00 | loss scale: 65536.0 | "
        "grad norm: 2.345 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        " iteration      200/  500000 | consumed samples:        51200 | elapsed time per iteration (ms): 1234.5 | "
        "learning rate: 1.500E-04 | global batch size:   256 | lm loss: 8.125000E+00 | loss scale: 32768.0 | "
        "grad norm: inf | number of skipped iterations:   2 | number of nan iterations:   1 |\n"
        "[2024-01-05 10:00:00.000000] iteration      300/  500000 | consumed samples:        43408 | "
        "elapsed time per iteration (ms): 4247.9 | learning rate: 2.999E-04 | global batch size:     8 | loss scale: 1.0 | "
        "grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        [
            {"step": 100, "loss": 9.125, "grad_norm": 2.345, "lr": [1.5e-4], "loss_scale": 65536.0},
            {
                "step": 200,
                "loss": 8.125,
                "losses": {"nan iterations": NAN},
                "grad_norm": INF,
                "lr": [1.5e-4],
                "loss_scale": 32768.0,
                "skipped": True,
            },
            {"step": 300, "loss": NAN, "grad_norm": NAN, "lr": [2.999e-4], "loss_scale": 1.0},
        ],
    ),
    "Megatron, of whose iterations none has a loss": (
        " iteration      400/  500000 | consumed samples: 1 | learning rate: 1.500E-04 | loss scale: 65536.0 | "
        "number of skipped iterations:   0 | number of nan iterations: 100 |\n",
        [{"step": 400, "loss": NAN, "losses": {"nan iterations": NAN}, "lr": [1.5e-4], "loss_scale": 65536.0}],
    ),
    "nanoGPT, estimates before and after the step": (
        "step 0: train loss 10.9803, val loss 10.9891\niter 0: loss 10.9772, time 67283.24ms, mfu -100.00%\n"
        "iter 10: loss 9.5, time 1000.24ms, mfu 16.00%\nstep 10: train loss 9.4803, val loss 9.4891\n",
        [
            {"step": 0, "loss": 10.9772, "metrics": {"val loss": 10.9891, "train loss": 10.9803}},
            {"step": 10, "loss": 9.5, "metrics": {"val loss": 9.4891, "train loss": 9.4803}},
        ],
    ),
    "nothing but estimates": (
        "step 0: train loss 4.2221, val loss 4.2306\nstep 500: train loss 1.7600, val loss 1.9146\n",
        [
            {"step": 0, "loss": 4.2221, "metrics": {"val loss": 4.2306}},
            {"step": 500, "loss": 1.76, "metrics": {"val loss": 1.9146}},
        ],
    ),
    "build-nanogpt": (
        "0 val 10.9503\n0 hella 0.2463\n0 train 10.955029\n1 train 10.5\n2 train nan\n",
        [
            {"step": 0, "loss": 10.955029, "metrics": {"val loss": 10.9503, "hellaswag accuracy": 0.2463}},
            {"step": 1, "loss": 10.5},
            {"step": 2, "loss": NAN},
        ],
    ),
    "detectron2 to its end": (
        "\x1b[32m[05/14 20:13:04 d2.utils.events]: \x1b[0m eta: 5:41:39  iter: 39  total_loss: 6597  loss_cls: 433.6  "
        "loss_box_reg: 6163  time: 0.2299  last_time: 0.2  data_time: 0.0033  lr: 0.001319  max_mem: 3782M\n"
        "FloatingPointError: Loss became infinite or NaN at iteration=52!\n"
        "loss_dict = {'loss_cls': tensor(nan, device='cuda:0', grad_fn=<NllLossBackward>), 'loss_box_reg': tensor(inf)}\n",
        [
            {"step": 39, "loss": 6597.0, "losses": {"loss_cls": 433.6, "loss_box_reg": 6163.0}, "lr": [0.001319]},
            {"step": 52, "loss": NAN},
            {"step": 52, "loss": NAN, "losses": {"loss_cls": NAN, "loss_box_reg": INF}},
        ],
    ),
    "mmdet over epochs": (
        "2020-08-01 01:10:31,475 - mmdet - INFO - Epoch [1][50/1749]\tlr: 2.000e-02, eta: 0:52:33, time: 1.899, "
        "memory: 5280, loss_rpn_cls: 0.2532, s0.loss_cls: 0.2136, s0.acc: 94.4818, loss: 0.7339, grad_norm: 0.0668\n"
        "2020-08-01 02:12:31,475 - mmdet - INFO - Epoch(val) [1][1749]\tbbox_mAP: 0.3150\n"
        "2020-08-01 02:12:31,475 - mmdet - INFO - Epoch [2][50/1749]\tlr: 2.000e-02, loss_rpn_cls: nan, s0.loss_cls: 0.2136, "
        "s0.acc: 94.4818, loss: nan, grad_norm: nan\n"
        "08/03 22:19:24 - mmengine - INFO - Iter(train) [ 9000/90000]  lr: 2.0000e-02  eta: 0:39:15  loss: 0.5\n",
        [
            {
                "step": 50,
                "loss": 0.7339,
                "losses": {"loss_rpn_cls": 0.2532, "s0.loss_cls": 0.2136},
                "grad_norm": 0.0668,
                "lr": [0.02],
                "metrics": {"bbox_mAP": 0.315},
            },
            {
                "step": 1799,
                "loss": NAN,
                "losses": {"loss_rpn_cls": NAN, "s0.loss_cls": 0.2136},
                "grad_norm": NAN,
                "lr": [0.02],
            },
            {"step": 9000, "loss": 0.5, "lr": [0.02]},
        ],
    ),
    "mmdet json over epochs": (
        '{"env_info": "Python: 3.7", "seed": 1}\n'
        '{"mode": "train", "epoch": 1, "iter": 50, "lr": 0.002, "memory": 3781, "loss": 1.6}\n'
        '{"mode": "train", "epoch": 1, "iter": 100, "lr": 0.004, "memory": 3781, "loss": 1.5}\n'
        '{"mode": "val", "epoch": 1, "iter": 625, "lr": 0.02, "bbox_mAP": 0.3}\n'
        '{"mode": "train", "epoch": 2, "iter": 50, "lr": 0.004, "memory": 3781, "loss": 1.4}\n',
        [
            {"step": 50, "loss": 1.6, "lr": [0.002]},
            {"step": 100, "loss": 1.5, "lr": [0.004], "metrics": {"bbox_mAP": 0.3}},
            {"step": 150, "loss": 1.4, "lr": [0.004]},
        ],
    ),
    "ultralytics on the screen": (
        "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "      1/100      2.35G       1.25        2.5        1.5         15        640: 100%|██████████| 74/74 [00:21<00:00]\n"
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|███| 4/4 [00:01<00:00]\n"
        "                   all        128        929      0.640      0.537      0.605      0.446\n"
        "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "      2/100      2.35G        nan        nan        nan         15        640: 100%|██████████| 74/74 [00:21<00:00]\n",
        [
            {
                "step": 1,
                "loss": 5.25,
                "losses": {"box_loss": 1.25, "cls_loss": 2.5, "dfl_loss": 1.5},
                "metrics": {"mAP50": 0.605, "mAP50-95": 0.446},
            },
            {"step": 2, "loss": NAN, "losses": {"box_loss": NAN, "cls_loss": NAN, "dfl_loss": NAN}},
        ],
    ),
    "the ImageNet example with its validation": (
        "Epoch: [0][10/5005]\tTime 0.521 (1.323)\tData 0.000 (0.5)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.39 (  0.12)\n"
        "Test: [ 0/196]\tTime  5.302 ( 5.302)\tLoss 4.1e+00 (4.5e+00)\tAcc@1  13.28 ( 13.28)\n"
        "Test: [10/196]\tTime  5.302 ( 5.302)\tLoss 4.1e+00 (4.25e+00)\tAcc@1  13.28 ( 13.50)\n"
        " *   Acc@1 14.000 Acc@5 36.000\n"
        "Epoch: [1][ 0/5005]\tTime 0.521 (1.323)\tData 0.000 (0.5)\tLoss nan (nan)\tAcc@1   0.39 (  0.12)\n",
        [
            {"step": 10, "loss": 6.9, "metrics": {"val Loss": 4.25, "val Acc@1": 14.0, "val Acc@5": 36.0}},
            {"step": 5005, "loss": NAN},
        ],
    ),
    "DeiT": (
        "Epoch: [0]  [  10/1251]  eta: 0:23:45  lr: 0.000001  loss: 6.8 (6.92)  time: 0.5  data: 0.1  max mem: 6543\n"
        "Averaged stats: lr: 0.000001  loss: 6.85 (6.9)\n"
        "Test:  [ 0/66]  eta: 0:03:12  loss: 5.9 (5.9)  acc1: 10.0 (10.0)  time: 2.9  data: 2.5  max mem: 6543\n"
        "Loss is nan, stopping training\n",
        [
            {"step": 10, "loss": 6.8, "lr": [1e-6], "metrics": {"val loss": 5.9, "val acc1": 10.0}},
            {"step": 10, "loss": NAN},
        ],
    ),
    "timm": (
        "Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.95)  Time: 3.2s,   80.12/s  (3.2s,   80.12/s)  LR: 1.000e-06\n"
        "Train: 1 [   0/1251 (  0%)]  Loss: nan (nan)  Time: 0.2s, 1280.12/s  (0.3s,  900.12/s)  LR: 1.000e-06\n",
        [{"step": 50, "loss": 6.95, "lr": [1e-6]}, {"step": 1251, "loss": NAN, "lr": [1e-6]}],
    ),
    "Keras, batch by batch": (
        "Epoch 1/3\n"
        "\r  1/100 [..............................] - ETA: 1:00 - loss: 2.3 - accuracy: 0.1\b\b\b\b\b"
        "\r 50/100 [=============>................] - ETA: 5s - loss: 2.0 - accuracy: 0.2\b\b\b"
        "\r100/100 [==============================] - 5s 50ms/step - loss: 1.9 - accuracy: 0.3 - val_loss: 1.8\n"
        "Epoch 2/3\n\r  1/100 [..............................] - ETA: 1:00 - loss: nan - accuracy: 0.1\n",
        [
            {"step": 1, "loss": 2.3},
            {"step": 50, "loss": 2.0},
            {"step": 100, "loss": 1.9, "metrics": {"val_loss": 1.8}},
            {"step": 101, "loss": NAN},
        ],
    ),
    "Keras 3": (
        "Epoch 1/2\n\x1b[1m100/100\x1b[0m \x1b[32m━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 2ms/step - "
        "accuracy: 0.5123 - loss: 1.25 - val_accuracy: 0.61 - val_loss: 1.1\n",
        [{"step": 1, "loss": 1.25, "metrics": {"val_accuracy": 0.61, "val_loss": 1.1}}],
    ),
    "Keras in two lines": (
        "Epoch 1/2\n100/100 - 5s - loss: 0.5 - val_loss: 0.6 - 5s/epoch - 50ms/step\n"
        "Epoch 2/2\n100/100 - 5s - loss: nan - val_loss: nan - 5s/epoch - 50ms/step\n",
        [
            {"step": 1, "loss": 0.5, "metrics": {"val_loss": 0.6}},
            {"step": 2, "loss": NAN, "metrics": {"val_loss": NAN}},
        ],
    ),
    "NeMo": (
        "Epoch 0:   1%|          | 10/1000 [00:10<17:00,  1.03s/it, loss=10.9, v_num=, reduced_train_loss=nan, "
        "global_step=9.000, consumed_samples=80.00, grad_norm=3.2]\n"
        "Training epoch 0, iteration 11/99 | lr: 2e-06 | global_batch_size: 8 | global_step: 11 | reduced_train_loss: 11.5\n",
        [
            {"step": 9, "loss": 10.9, "losses": {"reduced_train_loss": NAN}, "grad_norm": 3.2},
            {"step": 11, "loss": 11.5, "lr": [2e-6]},
        ],
    ),
    "transformers with its bar": (
        "  0%|          | 0/400 [00:00<?, ?it/s]\r  5%|▌         | 20/400 [05:12<1:21:56, 13.24s/it]"
        "{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.5}\n"
        "{'loss': '2.294', 'grad_norm': '0.7918', 'learning_rate': '1.989e-05', 'epoch': '0.11'}\n"
        "{'eval_loss': 2.2, 'eval_accuracy': 0.5, 'eval_runtime': 12.1, 'eval_samples_per_second': 12.1, 'epoch': 1.0}\n"
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 1.5}\n"
        "{'train_runtime': 123.4, 'train_samples_per_second': 12.2, 'train_loss': 2.2, 'epoch': 3.0}\n",
        [
            {"step": 1, "loss": 2.31, "grad_norm": 0.9, "lr": [5e-05]},
            {
                "step": 2,
                "loss": 2.294,
                "grad_norm": 0.7918,
                "lr": [1.989e-05],
                "metrics": {"eval_loss": 2.2, "eval_accuracy": 0.5},
            },
            {"step": 3, "loss": NAN, "grad_norm": NAN, "lr": [5e-05]},
        ],
    ),
    "the MNIST example": (
        "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300000\nTrain Epoch: 1 [640/60000 (1%)]\tLoss: 1.700000\n\n"
        "Test set: Average loss: 0.0500, Accuracy: 9830/10000 (98%)\n\nTrain Epoch: 2 [0/60000 (0%)]\tLoss: nan\n",
        [
            {"step": 0, "loss": 2.3},
            {"step": 640, "loss": 1.7, "metrics": {"val Average loss": 0.05, "val Accuracy": 98.0}},
            {"step": 60000, "loss": NAN},
        ],
    ),
    "a line for each epoch": (
        "Epoch 1/20 | train loss 0.69 | val loss 0.70 | val acc 0.51\nEpoch 2/20 | train loss nan | val loss nan | val acc 0.1\n",
        [
            {"step": 1, "loss": 0.69, "metrics": {"val loss": 0.7, "val acc": 0.51}},
            {"step": 2, "loss": NAN, "metrics": {"val loss": NAN, "val acc": 0.1}},
        ],
    ),
    "several lines for each epoch": (
        "Epoch 1 loss 0.9\nEpoch 1 loss 0.8\nEpoch 2 loss 0.7\nEpoch 2 loss 0.6\n",
        [{"step": s, "loss": v} for s, v in ((1, 0.9), (2, 0.8), (3, 0.7), (4, 0.6))],
    ),
    "two losses and no total": (
        "[Epoch 0/200] [Batch 0/938] [D loss: 0.5] [G loss: 0.75]\n[Epoch 1/200] [Batch 1/938] [D loss: nan] [G loss: 1.0]\n",
        [
            {"step": 0, "loss": 1.25, "losses": {"D loss": 0.5, "G loss": 0.75}},
            {"step": 939, "loss": NAN, "losses": {"D loss": NAN, "G loss": 1.0}},
        ],
    ),
    "one quantity a line": (
        "loss: 2.5\ngrad_norm: 0.5\nlr: 0.001\nloss: 2.25\ngrad_norm: nan\nlr: 0.001\n",
        [
            {"step": 1, "loss": 2.5, "grad_norm": 0.5, "lr": [0.001]},
            {"step": 2, "loss": 2.25, "grad_norm": NAN, "lr": [0.001]},
        ],
    ),
    "ranks that interleave": (
        "[rank0]: step 1 loss 2.0\n[rank1]: step 1 loss 2.5\n[rank1]: step 2 loss nan\n[rank0]: step 2 loss 1.5\n"
        "[default2]:step 2 loss 2.25\n[1,3]<stdout>:step 2 loss 2.75\n4: {'loss': 2.125, 'learning_rate': 0.5, 'epoch': 0.1}\n"
        "[Rank 5] step 2 loss 1.0\n",
        [
            {"step": 1, "loss": 2.0},
            {"step": 1, "rank": 1, "loss": 2.5},
            {"step": 2, "rank": 1, "loss": NAN},
            {"step": 2, "loss": 1.5},
            {"step": 2, "rank": 2, "loss": 2.25},
            {"step": 2, "rank": 3, "loss": 2.75},
            {"step": 1, "rank": 4, "loss": 2.125, "lr": [0.5]},
            {"step": 2, "rank": 5, "loss": 1.0},
        ],
    ),
    "other trainers, a line each": (
        "2024-12-22 17:54:52,310 Epoch[1/20][6000/30477] eta: 9 days, 18:59:37, lr: 5e-05, grad_scale: 4.0, total_loss: 0.25\n"
        "INFO:tensorflow:global step 6200: loss = 2.25 (0.512 sec/step)\n"
        "[2022/05/01 10:00:00] ppocr INFO: epoch: [1/500], global_step: 6300, lr: 0.5, acc: 0.1, loss: 25.5, ips: 100\n"
        "Step... (6500 | Loss: 2.5, Learning Rate: 0.001)\n"
        "Steps:  10%|█         | 6600/9000 [00:10<01:30, 10.0it/s, loss=0.125, lr=1e-5]\n"
        " 6700: 12.345678, 15.432100 avg loss, 0.001000 rate, 5.234567 seconds, 6400 images, 12.3 hours left\n"
        "Train loss 6800 2.345678 Grad Norm 12.5 1.23s/it\n"
        "07:29:53: train iter: 6900 loss_net: nan loss_scale: 785.5 norm: nan norm_average: 0.8729 seconds: 122.871\n",
        [
            {"step": 6000, "loss": 0.25, "lr": [5e-5], "loss_scale": 4.0},
            {"step": 6200, "loss": 2.25},
            {"step": 6300, "loss": 25.5, "lr": [0.5]},
            {"step": 6500, "loss": 2.5, "lr": [0.001]},
            {"step": 6600, "loss": 0.125, "lr": [1e-5]},
            {"step": 6700, "loss": 12.345678, "lr": [0.001]},
            {"step": 6800, "loss": 2.345678, "grad_norm": 12.5},
            {"step": 6900, "loss": NAN, "grad_norm": NAN, "loss_scale": 785.5},
        ],
    ),
    "two programs that print the same step": (
        "[INFO|2024-12-08 01:09:59] llamafactory.train.callbacks:157 >> {'loss': 0.5000, 'learning_rate': 4.9985e-05, 'epoch': 0.03}\n"
        "{'loss': 0.5, 'grad_norm': 1.5, 'learning_rate': 4.998452e-05, 'epoch': 0.03}\n"
        "  1%|█▍   | 75/6249 [08:38<11:33:05,  6.74s/it][INFO|2024-12-08 01:10:34] llamafactory.train.callbacks:157 >> "
        "{'loss': 0.0000, 'learning_rate': 4.9982e-05, 'epoch': 0.04}\n"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.998223e-05, 'epoch': 0.04}\n",
        [
            {"step": 1, "loss": 0.5, "grad_norm": 1.5, "lr": [4.998452e-05]},
            {"step": 2, "loss": 0.0, "grad_norm": NAN, "lr": [4.998223e-05]},
        ],
    ),
    "a block of lines for each step": (
        "   --> STEP: 24/100 -- GLOBAL_STEP: 25\n     | > loss: 2.5  (2.75)\n     | > amp_scaler: 65536.0  (65536.0)\n"
        "     | > grad_norm: 1.5  (1.6)\n     | > current_lr: 0.25 \n     | > step_time: 0.5  (0.6)\n\n"
        "   --> STEP: 49/100 -- GLOBAL_STEP: 50\n     | > loss: nan  (nan)\n     | > amp_scaler: 32768.0  (50000.0)\n",
        [
            {"step": 25, "loss": 2.5, "grad_norm": 1.5, "lr": [0.25], "loss_scale": 65536.0},
            {"step": 50, "loss": NAN, "loss_scale": 32768.0},
        ],
    ),
    "a table drawn with bars": (
        "| Step | Training Loss | Validation Loss |\n|------|---------------|-----------------|\n"
        "| 100  | 2.5           | 2.6             |\n| 200  | nan           | nan             |\n",
        [
            {"step": 100, "loss": 2.5, "metrics": {"Validation Loss": 2.6}},
            {"step": 200, "loss": NAN, "metrics": {"Validation Loss": NAN}},
        ],
    ),
    "PyTorch's tutorials": (
        "[1,  2000] loss: 2.218\n[1,  4000] loss: 1.875\n[2,  2000] loss: nan\n",
        [{"step": 2000, "loss": 2.218}, {"step": 4000, "loss": 1.875}, {"step": 6000, "loss": NAN}],
    ),
    "fastai": (
        "epoch     train_loss  valid_loss  accuracy  time    \n0         0.5         0.25      0.8125    00:10     \n"
        "1         nan         nan         0.1125    00:10     \n",
        [
            {"step": 0, "loss": 0.5, "metrics": {"valid_loss": 0.25}},
            {"step": 1, "loss": NAN, "metrics": {"valid_loss": NAN}},
        ],
    ),
    "settings and prose are no records": (
        "Namespace(lr=0.1, step=[30, 60], loss_scale=0, eval_delay=0)\nTotal params: 124439808\nResuming from step 500\n"
        "lr: 0.001\nmax_grad_norm: 1.0\nwarmup_loss_weight: 0.5\nloading loss module from /x/loss.py:45\n"
        '  File "/x/train.py", line 128, in check_nan_overflow\n    raise FloatingPointError("Loss became nan")\n'
        "{'loss': 2.5, 'epoch': 0.1}\n{'loss': 2.25, 'epoch': 0.2}\n",
        [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}],
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_lines_are_read_to_the_exact_numbers(name: str, tmp_path: pathlib.Path) -> None:
    text, want = SAMPLES[name]
    got = read(tmp_path, text)
    assert got == [{key: value for key, value in step.items() if value is not None} for step in want]


# ---- names and numbers


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *(
            (key, "loss")
            for key in (
                "loss",
                "train_loss",
                "train/loss",
                "Loss/train",
                "lm loss",
                "total_loss",
                "nll",
                "CrossEntropyLoss",
            )
        ),
        *((key, "losses") for key in ("loss_cls", "box_loss", "D loss", "aux_loss", "loss/kl")),
        *(
            (key, "grad_norm")
            for key in (
                "grad_norm",
                "gnorm",
                "grad norm",
                "grad/param norm",
                "gradient_norm",
                "total_norm",
                "grad_2.0_norm_total",
                "optim/total_grad_norm",
            )
        ),
        *(
            (key, "lr")
            for key in ("lr", "learning_rate", "lr-AdamW", "lr/pg0", "optim/learning_rate_group0", "LearningRate")
        ),
        *(
            (key, "loss_scale")
            for key in ("loss_scale", "loss scale", "scale", "grad_scale", "scaler", "amp/scale", "LossScale")
        ),
        *(
            (key, "metric")
            for key in (
                "val_loss",
                "eval/accuracy",
                "valid_nll_loss",
                "test_acc",
                "Loss/val",
                "bbox_mAP",
                "metrics/mAP50(B)",
            )
        ),
        *(
            (key, "step")
            for key in ("step", "iter", "iteration", "global_step", "num_updates", "trainer/global_step", "_step")
        ),
        ("epoch", "epoch"),
        ("batch_idx", "batch"),
        ("number of skipped iterations", "skips"),
        ("clipped_grad_norm", "clipped_norm"),
    ],
)
def test_a_name_means_its_quantity(key: str, kind: str) -> None:
    found = meaning(key)
    assert found is not None and found.kind == kind


@pytest.mark.parametrize(
    "key",
    [
        "max_grad_norm",
        "loss_weight",
        "warmup_steps",
        "loss.py",
        "init_scale",
        "loss_scale_window",
        "time",
        "weight_norm",
        "max_lr",
        "best_val_loss",
        "grad_norm/layer.0.weight",
        "batch size",
        "eval_steps",
        "eval_runtime",
    ],
)
def test_a_setting_is_no_quantity(key: str) -> None:
    found = meaning(key)
    assert found is None or found.kind == "ignored"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            (text, math.nan)
            for text in (
                "nan",
                "NaN",
                "-nan",
                "nan(ind)",
                "-nan(ind)",
                "1.#QNAN",
                "1.#QNAN0",
                "-1.#IND",
                "tensor(nan, device='cuda:0')",
                "array(nan)",
                "np.float32(nan)",
                "'nan'",
            )
        ),
        *((text, math.inf) for text in ("inf", "Infinity", "+inf", "1.#INF", "tensor(inf)", "∞")),
        ("-Infinity", -math.inf),
        ("-1.#INF", -math.inf),
        ("1e+04", 1e4),
        ("1,234.5", 1234.5),
        ("2.3K", 2300.0),
        ("16.1%", 16.1),
        ("tensor(2.5, grad_fn=<X>)", 2.5),
    ],
)
def test_every_spelling_is_its_number(text: str, value: float) -> None:
    found = number(text)
    assert found is not None and (found == value or (math.isnan(value) and math.isnan(found)))


@pytest.mark.parametrize(
    "text", ["", "None", "null", "nano", "info", "1.2.3", "12:30", "abc", "--", "tensor(a)", "1,23,4"]
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert number(text) is None


# ---- numbers of steps


def test_a_run_that_begins_anew_stays_in_file_order_and_is_marked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("step 100 loss 2.0\nstep 200 loss 1.5\nstep 150 loss 1.75\nstep 250 loss 1.25\n")
    steps = steps_of(path)
    assert [step.step for step in steps] == [100, 200, 150, 250]
    assert [step.note for step in steps] == [None, None, "step numbers go back from 200 to 150", None]


def test_a_bar_that_is_drawn_again_is_one_record(tmp_path: pathlib.Path) -> None:
    line = "Epoch 0:  10%|█         | 100/1000 [00:10<01:30, 10.00it/s, train_loss=2.5]"
    assert read(tmp_path, f"{line}\r{line}\r{line}\n") == [{"step": 100, "loss": 2.5}]


def test_negative_steps_are_kept(tmp_path: pathlib.Path) -> None:
    assert read(tmp_path, "step -1 loss 2.5\nstep 0 loss 2.0\n") == [
        {"step": -1, "loss": 2.5},
        {"step": 0, "loss": 2.0},
    ]


def test_lines_are_counted_as_an_editor_does(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(
        "hello\n\n  5%|5 | 1/9 [00:01]\r  6%|6 | 2/9 [00:01]\r\nstep 1 loss 2.0\r\n\nstep 2 loss 1.0", newline=""
    )
    assert [step.line for step in steps_of(path)] == [4, 6]


# ---- what comes with it


def test_what_was_not_understood_is_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("grad stats <<7>>\nstep 1 loss 2.0\nworker started with 4 threads\n")
    course = read_log(path)
    assert course.unknown == ("1: grad stats <<7>>", "3: worker started with 4 threads")
    assert (course.lines, course.understood, course.records) == (3, 1, 1)


def test_the_format_is_told_by_what_was_recognised_most(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(FORMATS["transformers dicts"].write(example()))
    assert read_log(path).format == "transformers dicts, DeepSpeed messages"


def test_progress_is_told_up_to_the_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(FORMATS["plain"].write(example()))
    told: list[tuple[int, int | None]] = []
    read_log(path, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        buffer = io.BytesIO(b"step 1 loss 2.0\nstep 2 loss nan\n")

    monkeypatch.setattr(sys, "stdin", Stream())
    course = read_log("-")
    assert (course.records, course.symptom, course.first_bad_step) == (2, "nan_inf", 2)


# ---- ranks


def test_logs_of_several_ranks_are_merged_by_step(tmp_path: pathlib.Path) -> None:
    for rank in (2, 0, 1):
        lines = [
            f"step {step} loss {'nan' if rank == 2 and step >= 30 else 2.0 + rank}\n" for step in range(10, 60, 10)
        ]
        (tmp_path / f"rank{rank}.log").write_text("".join(lines))
    seen: list[tuple[int | None, int]] = []
    course = read_ranks([tmp_path / f"rank{rank}.log" for rank in (2, 0, 1)])
    for rank in (2, 0, 1):
        seen += [(step.step, step.rank) for step in steps_of(tmp_path / f"rank{rank}.log", rank=rank)]
    assert len(seen) == 15 and course.records == 15
    assert (course.ranks, course.symptom, course.first_bad_step) == (3, "nan_inf", 30)
    first = course.symptoms[0].first
    assert first is not None and first.rank == 2


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one file"):
        read_ranks([])


# ---- TensorBoard and folders


def events(folder: pathlib.Path, rows: list[tuple[str, int, float]]) -> pathlib.Path:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    proto = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    out = writer.EventFileWriter(str(folder))
    for tag, step, value in rows:
        said = summary.Summary(value=[summary.Summary.Value(tag=tag, simple_value=value)])
        out.add_event(proto.Event(wall_time=1.0, step=step, summary=said))
    out.close()
    return next(folder.glob("*tfevents*"))


ROWS = [
    ("train/loss", 10, 2.5),
    ("train/grad_norm", 10, 0.5),
    ("train/learning_rate", 10, 0.25),
    ("system/gpu_temp", 10, 60.0),
    ("train/loss", 20, math.nan),
    ("train/grad_norm", 20, math.inf),
    ("eval/loss", 20, 2.75),
]
BOARD = [
    {"step": 10, "loss": 2.5, "grad_norm": 0.5, "lr": [0.25]},
    {"step": 20, "loss": NAN, "grad_norm": INF, "metrics": {"eval/loss": 2.75}},
]


def test_event_files_of_tensorboard_are_read(tmp_path: pathlib.Path) -> None:
    assert [comparable(step) for step in steps_of(events(tmp_path, ROWS))] == BOARD


def test_an_event_file_that_breaks_off_gives_what_it_has(tmp_path: pathlib.Path) -> None:
    path = events(tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    steps = [comparable(step) for step in steps_of(path)]
    assert steps[0] == BOARD[0] and "metrics" not in steps[1]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = events(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        read_log(path)


def test_a_folder_of_tensorboard_or_lightning_is_read(tmp_path: pathlib.Path) -> None:
    board, lightning = tmp_path / "board", tmp_path / "lightning_logs" / "version_0"
    board.mkdir()
    events(board, ROWS)
    lightning.mkdir(parents=True)
    (lightning / "metrics.csv").write_text("epoch,step,train_loss\n0,9,2.5\n0,19,2.25\n")
    assert read_log(board).records == 2
    assert read_log(tmp_path / "lightning_logs").format == "Lightning metrics.csv"


def test_a_folder_without_a_known_log_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "notes.txt").write_text("step 1 loss 2.0")
    with pytest.raises(UsageError, match="give the log file in it"):
        read_log(tmp_path)


def test_a_folder_with_several_runs_is_refused(tmp_path: pathlib.Path) -> None:
    for version in (0, 1):
        (tmp_path / f"version_{version}").mkdir()
        (tmp_path / f"version_{version}" / "metrics.csv").write_text("step,loss\n1,2.0\n")
    with pytest.raises(UsageError, match=r"2 files metrics\.csv: give one of them"):
        read_log(tmp_path)


def test_the_function_is_exported() -> None:
    assert nanhunt.read_log is read_log
