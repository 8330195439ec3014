"""The numbers of a finding for a logger: flat, finite, named, and TensorBoard takes them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nanhunt.finding import Finding, TensorStats

FINDING = Finding(
    phase="forward",
    step=12_000,
    call=2,
    module="layers.3.norm",
    op="aten.div.Tensor",
    kind="nan",
    cause="underflow",
    tensors=(
        TensorStats(
            role="input", name="x", shape=(4, 8), dtype="float16", absmax=4.5, zero=0, headroom={"bfloat16": 126}
        ),
        TensorStats(role="input", name="eps", shape=(), dtype="float16", absmax=0.0, headroom_bits=math.inf),
        TensorStats(role="output", numel=32, nan=7, absmax=math.nan, min=-math.inf, first_bad=(1, 2)),
    ),
    context={
        "lr": 0.5,
        "loss_scale": None,
        "reproduced": True,
        "torch": "2.13.0",
        "ledger": {"born": 1},
        "rates": [1, 2],
    },
)


def test_every_number_has_its_key_and_nothing_else_has_one() -> None:
    """Texts, unknown numbers, NaN, infinities and lists of a tensor are left out; a second row is counted."""
    assert FINDING.scalars() == {
        "nanhunt/step": 12_000.0,
        "nanhunt/call": 2.0,
        "nanhunt/handled": 0.0,
        "nanhunt/input.absmax": 4.5,
        "nanhunt/input.zero": 0.0,
        "nanhunt/input.headroom.bfloat16": 126.0,
        "nanhunt/input2.absmax": 0.0,
        "nanhunt/output.numel": 32.0,
        "nanhunt/output.nan": 7.0,
        "nanhunt/lr": 0.5,
        "nanhunt/reproduced": 1.0,
        "nanhunt/ledger.born": 1.0,
        "nanhunt/rates.0": 1.0,
        "nanhunt/rates.1": 2.0,
    }


def test_all_values_are_finite_floats() -> None:
    """Of type float each, whatever stands in the record, a whole number beyond float64 included."""
    huge = Finding(phase="forward", step=10**400, rank=3, context={"a": math.nan, "b": {"c": [math.inf, 2]}})
    assert huge.scalars() == {"nanhunt/rank": 3.0, "nanhunt/handled": 0.0, "nanhunt/b.c.1": 2.0}
    for finding in (FINDING, huge):
        assert all(type(value) is float and math.isfinite(value) for value in finding.scalars().values())


def test_what_is_no_fault_says_so() -> None:
    assert Finding(phase="forward", handled="absorbed").scalars() == {"nanhunt/handled": 1.0}


def test_what_the_context_holds_replaces_no_number_of_the_finding() -> None:
    assert Finding(phase="forward", step=5, context={"step": 1}).scalars()["nanhunt/step"] == 5.0


def test_a_saved_finding_gives_the_same_numbers_without_torch(tmp_path: Path) -> None:
    """Scalars of a file, on a machine where importing torch would be a pity."""
    file = tmp_path / "finding.json"
    file.write_text(FINDING.to_json())
    code = (
        "import sys, json, pathlib, nanhunt; "
        f"f = nanhunt.Finding.from_json(pathlib.Path({str(file)!r}).read_text()); "
        "print(json.dumps(f.scalars())); sys.exit('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == FINDING.scalars()


def test_tensorboard_takes_them(tmp_path: Path) -> None:
    """torch's own SummaryWriter writes each under its key at the step of the finding, and reads them back."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for key, value in FINDING.scalars().items():
            writer.add_scalar(key, value, FINDING.step)
    events = EventAccumulator(str(tmp_path)).Reload()
    read = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    assert read == {key: [(12_000, value)] for key, value in FINDING.scalars().items()}


def test_a_real_finding_tells_range_and_headroom() -> None:
    """Of a float16 model that overflows: the operand's largest number, the bits it had left, the counts."""
    torch = pytest.importorskip("torch")
    import nanhunt

    class Square(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x * x

    with nanhunt.watch(Square(), on_hit="record") as hunt:
        hunt.model(torch.tensor([1.0, 1024.0]).half())
    scalars = hunt.finding.scalars()
    assert scalars["nanhunt/step"] == 0.0
    absmax = [value for key, value in scalars.items() if key.endswith(".absmax") and "output" not in key]
    bits = [value for key, value in scalars.items() if key.endswith(".headroom_bits") and "output" not in key]
    assert absmax[0] == 1024.0 and bits[0] == pytest.approx(math.log2(65504 / 1024))
    assert scalars["nanhunt/output.pos_inf"] == 1.0
