"""Planted faults: a sample of the sweep of scripts/plant.py, and proofs that the oracle behind it can say no."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
if not SCRIPTS.is_dir():
    pytest.skip("the scripts of the repository are not here", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))

pytest.importorskip("transformers")
pytest.importorskip("hypothesis")

import nested  # noqa: E402
import oracle  # noqa: E402
import plant  # noqa: E402
import planting  # noqa: E402
import specimens  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as hooks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SEED, PER_MODEL, RANDOM, PER_RANDOM = 7, 16, 12, 10
DRAWN = {f"random:{i}": spec for i, spec in enumerate(nested.draw(RANDOM, SEED))}


@functools.lru_cache(maxsize=2)
def oracle_of(name: str) -> oracle.Oracle:
    warnings.simplefilter("ignore")
    return oracle.Oracle(specimens.tiny(name) if name not in DRAWN else nested.drawn(DRAWN[name], name))


def sample(name: str, count: int) -> list[planting.Plant]:
    return plant.plants_of(name, DRAWN.get(name), SEED, count)


# ---- nanhunt


@pytest.mark.parametrize("detail", ["auto", "module", "op"])
@pytest.mark.parametrize("name", [*specimens.MODELS, *DRAWN])
def test_every_sampled_plant_is_answered_rightly(name: str, detail: str) -> None:
    """Phase, module and kind are right for each harmful plant, and nothing is said of a harmless one."""
    count = PER_MODEL if name in specimens.MODELS else PER_RANDOM
    if detail != "auto":
        count //= 4
    results = [plant.judge(oracle_of(name), one, plant.ask_nanhunt, detail) for one in sample(name, count)]
    wrong = [str(result) for result in results if result.verdict == "wrong"]
    assert not wrong, "\n".join(wrong)


# ---- the sweep itself


class Small(nn.Module):
    """A model whose right answers can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)])
        self.unused = nn.Linear(2, 2)
        self.best: torch.Tensor
        self.register_buffer("best", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.best


@pytest.fixture
def small() -> oracle.Oracle:
    torch.manual_seed(0)
    batch = {"x": torch.rand(5, 3)}
    return oracle.Oracle(
        specimens.Specimen(name="small", model=Small(), batch=batch, loss=lambda out: out.pow(2).mean())
    )


def truth(small: oracle.Oracle, path: str, place: str, kind: str, **more: str) -> oracle.Truth:
    (one,) = [p for p in planting.every_plant(small.specimen, SEED) if (p.path, p.place, p.kind) == (path, place, kind)]
    return small.truth(one, **more)


@pytest.mark.parametrize(
    ("path", "place", "kind", "phase", "module"),
    [
        ("parts.0", "output", "nan", "forward", "parts.0"),
        ("parts.2", "output", "+inf", "forward", "parts.2"),
        ("", "output", "-inf", "forward", ""),
        ("parts.0", "gradient", "nan", "backward", "parts.0"),
        ("parts.2", "gradient", "-inf", "backward", "parts.2"),
        ("parts.2.bias", "weight", "+inf", "state", "parts.2"),
        ("best", "buffer", "nan", "state", ""),
        ("parts.0", "output", "-inf", None, None),  # relu makes a 0 of it, forward and backward
    ],
)
def test_right_answers_worked_out_by_hand(small, path, place, kind, phase, module) -> None:
    right = truth(small, path, place, kind)
    assert right.excluded is None
    assert right.phase == phase
    assert right.modules == (() if phase is None else (module,))
    assert bool(right.harm) == (phase is not None)


def test_what_cannot_be_decided_is_excluded_with_a_reason(small) -> None:
    assert truth(small, "parts", "output", "nan").excluded == "not_called"
    assert truth(small, "unused.weight", "weight", "nan").excluded == "never_read"
    assert truth(small, "best", "buffer", "+inf").excluded == "standing_inf"  # it reaches the loss as it stands
    assert {"not_called", "never_read", "standing_inf"} <= set(oracle.REASONS)


def test_an_infinity_that_stands_in_a_buffer_is_blamed_where_it_turns() -> None:
    """BatchNorm's running mean of -inf is harmless in training, a buffer that scales makes NaN of a 0 elsewhere."""
    body = ("sequential", ("scaled",), ("layer_norm",))
    turned = oracle.Oracle(nested.drawn(("plain", body), "turned"))
    (one,) = [p for p in planting.every_plant(turned.specimen) if p.path == "body.0.scale" and p.kind == "+inf"]
    right = turned.truth(one)
    assert (right.phase, right.modules, right.kinds) == ("forward", ("body.1",), ("nan",))


def test_a_model_that_is_ill_before_anything_is_planted_is_refused() -> None:
    model = Small()
    model.parts[0].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="small is not healthy before anything is planted: output"):
        oracle.Oracle(specimens.Specimen(name="small", model=model, batch={"x": torch.rand(5, 3)}, loss=torch.sum))


def test_a_plant_leaves_no_trace(small) -> None:
    """Parameters, buffers, gradients, forwards and global hooks are afterwards what they were."""
    before = planting.fingerprint(small.specimen.model)
    global_hooks = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    for one in planting.every_plant(small.specimen):
        small.truth(one)
    assert planting.fingerprint(small.specimen.model) == before
    assert all("forward" not in vars(module) for module in small.specimen.model.modules())
    assert all(parameter.grad is None for parameter in small.specimen.model.parameters())
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == global_hooks


def test_the_same_seed_draws_the_same_models() -> None:
    assert nested.draw(6, 3) == nested.draw(6, 3)
    assert nested.draw(6, 3) != nested.draw(6, 4)
    assert len(set(nested.draw(40, 3))) == 40


# ---- tools that are wrong, or right without nanhunt


def answers(tool, name: str = "bert", count: int = 60) -> Counter[str]:
    """How a made-up tool fares, which is told the plant and the truth, and runs the step as a tool must."""
    judge_of = oracle_of(name)
    fared: Counter[str] = Counter()
    for one in sample(name, count):
        right = judge_of.truth(one)

        def answer(specimen, detail, one=one, right=right):
            specimen.step(specimen.optimizer())
            return tool(one, right)

        result = plant.judge(judge_of, one, answer, "auto")
        fared[result.verdict] += 1
        fared["harmless"] += not right.excluded and right.phase is None
        fared["harmful"] += right.phase is not None
    return fared


def said(right: oracle.Truth, **changes: str) -> oracle.Answer | None:
    """The right answer, with parts of it changed."""
    if right.phase is None:
        return None
    fields = {"phase": right.phase, "module": right.modules[0], "kind": right.kinds[0]}
    return oracle.Answer(**{**fields, "tensor": right.tensors[0] if right.tensors else None, **changes})


def test_a_tool_that_is_always_right_gets_full_marks() -> None:
    fared = answers(lambda _, right: said(right))
    assert fared["wrong"] == 0
    assert fared["harmful"] > 40


def test_a_tool_that_always_blames_the_parent_is_caught() -> None:
    fared = answers(lambda _, right: said(right, module=str((right.modules or ("",))[0]).rpartition(".")[0] + "?"))
    assert fared["wrong"] == fared["harmful"] > 40


def test_a_tool_that_names_a_wrong_kind_or_phase_is_caught() -> None:
    assert answers(lambda _, right: said(right, kind="inf"))["wrong"] > 40
    assert answers(lambda _, right: said(right, phase="optimizer"))["wrong"] > 40


def test_a_tool_that_says_nothing_is_right_about_the_harmless_only() -> None:
    fared = answers(lambda *_: None, "resnet")
    assert fared["wrong"] == fared["harmful"] > 0
    assert fared["right"] == fared["harmless"] > 0


def test_a_tool_that_cries_wolf_is_wrong_about_the_harmless() -> None:
    wolf = oracle.Answer(phase="forward", module="resnet", kind="nan")
    fared = answers(lambda *_: wolf, "resnet")
    assert fared["wrong"] == fared["harmless"] + fared["harmful"]


def test_a_tool_that_changes_the_step_is_caught(small) -> None:
    (one,) = [p for p in planting.every_plant(small.specimen) if (p.path, p.kind) == ("parts.0", "-inf")][:1]

    def meddler(specimen, detail):
        specimen.step(specimen.optimizer())
        next(specimen.model.parameters()).data.mul_(1.001)

    result = plant.judge(small, one, meddler, "auto")
    assert result.verdict == "wrong"
    assert "differ from the step that nobody watched" in str(result)


@pytest.mark.parametrize("name", ["t5", "random:0", "random:3"])
def test_a_plain_look_at_module_outputs_agrees_with_the_oracle(name: str) -> None:
    """A second witness for the output plants: of all modules, the planted one is the first to return a bad tensor."""
    judge_of = oracle_of(name)
    model = judge_of.specimen.model
    names = {id(module): path for path, module in model.named_modules()}
    checked = 0
    for one in sample(name, 200):
        right = judge_of.truth(one)
        if one.place != "output" or right.phase is None:
            continue
        seen: list[tuple[str, tuple[str, ...]]] = []

        def look(module, _, output, seen=seen):
            bad = [planting.kinds_in(t) for t in planting.floating(output) if planting.is_bad(t)]
            seen.extend((names[id(module)], kinds) for kinds in bad if id(module) in names)

        with planting.planted(judge_of.specimen, one):
            handle = hooks.register_module_forward_hook(look)
            try:
                judge_of.specimen.step(judge_of.specimen.optimizer())
            finally:
                handle.remove()
        assert seen[0] == (one.path, (one.kind,))
        checked += 1
    assert checked > 20


# ---- the command line


def test_the_exit_code_says_whether_all_were_right(small, tmp_path, capsys) -> None:
    one = next(iter(planting.every_plant(small.specimen)))
    good = plant.Result(plant=one, truth=oracle.Truth())
    left_out = plant.Result(plant=one, truth=oracle.Truth(excluded="not_called"))
    bad = plant.Result(plant=one, truth=oracle.Truth(), answer=oracle.Answer(phase="forward", module="", kind="nan"))
    file = tmp_path / "plants.json"
    assert plant.report([good, left_out], 1.0, quiet=False, json_file=str(file)) == 0
    assert "1 of 1 right, 1 of 2 excluded" in capsys.readouterr().out
    assert '"verdict": "excluded"' in file.read_text()
    assert plant.report([good, bad], 1.0, quiet=False, json_file=None) == 1
    out = capsys.readouterr().out
    assert "WRONG small: nan in the output of (root) (Small)" in out
    assert "expected silence" in out
    assert plant.report([left_out], 1.0, quiet=True, json_file=None) == 1  # nothing was asked, so nothing was shown


def test_an_unknown_model_is_refused_with_the_names_there_are(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        plant.main(["--models", "bert,elmo"])
    assert stop.value.code == 2
    assert "unknown models elmo; there are bert, bert-eager" in capsys.readouterr().err
