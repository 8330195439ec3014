"""Each way to spread a model over ranks, with each fault on one of them: the right rank and module on all verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .rankwise import FAULTS, GUILTY, Ranks, needs_gloo

FORMS = (
    "ddp", "ddp watched before", "ddp find_unused_parameters", "ddp static_graph", "ddp comm hook", "ddp no_sync",
    "fsdp2", "fsdp2 watched before", "fsdp2 mixed, checkpointed", "fsdp1", "accelerate",
)  # fmt: skip
# What the verdict names: phase, module, tensor.
NAMED = {
    "forward": ("forward", "parts.1", "output"),
    "backward": ("backward", "parts.1", "grad_input"),
    "loss": ("forward", None, "loss"),
    "input": ("input", None, "x"),
}
ROOTS = ("by hand", "gathered", "sharded", "unwritten")


def _ran(folder: Path, scene: str, **asked: Any) -> list[Any]:
    needs_gloo()
    ranks = Ranks(folder, scene, 2, **asked)
    assert ranks.wait() == [0, 0], ranks.said()
    return ranks.told()


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    pytest.importorskip("accelerate")
    return _ran(tmp_path_factory.mktemp("forms"), "forms", forms=FORMS)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_rank_names_the_rank_and_the_module(form: str, fault: str, forms: list[Any]) -> None:
    """In the names of the user's model, and with the batch of the guilty rank."""
    said = [told[f"{form}: {fault}"] for told in forms]
    for rank, one in enumerate(said):
        verdict = one["verdict"]
        assert one["errors"] == []
        assert (verdict["rank"], verdict["first"], verdict["handed"]) == (GUILTY, GUILTY, "rank 0")
        assert (verdict["phase"], verdict["module"], verdict["tensor"]) == NAMED[fault]
        # Before the first update nobody knows that an optimizer ends the steps: each backward then counts as one.
        assert verdict["step"] == (2 if form == "ddp no_sync" else 1)
        assert verdict["kind"] == "nan"
        assert one["own"][0]["rank"] == rank
    assert said[0]["verdict"] == said[1]["verdict"]
    assert said[0]["own"][0]["cause"] == "collective" != said[1]["own"][0]["cause"]
    assert said[1]["own"][0]["hash"] == said[0]["verdict"]["hash"] != said[0]["own"][0]["hash"]
    assert "The other was handed it by the " in said[0]["verdict"]["why"]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _ran(tmp_path_factory.mktemp("split"), "tensor_parallel")


@pytest.mark.parametrize("fault", ["forward", "backward"])
@pytest.mark.parametrize("form", ["tensor", "sequence"])
def test_a_fault_in_one_half_of_a_split_layer_is_that_ranks(form: str, fault: str, split: list[Any]) -> None:
    """The sum over the ranks hands it to the other, which had given finite numbers."""
    for told in split:
        verdict = told[f"{form}: {fault}"]["verdict"]
        assert (verdict["rank"], verdict["module"], verdict["phase"]) == (GUILTY, "act", fault)
        assert verdict["handed"] == "rank 0" and "handed it by the " in verdict["why"]
    assert split[0][f"{form}: {fault}"]["own"][0]["cause"] == "collective"


@pytest.mark.parametrize("form", ["tensor", "sequence"])
def test_split_layers_without_a_fault_have_none(form: str, split: list[Any]) -> None:
    assert [told[f"{form}: None"]["verdict"] for told in split] == [None, None]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _ran(tmp_path_factory.mktemp("stages"), "pipeline")


@pytest.mark.parametrize("guilty, fault", [(0, "forward"), (1, "backward"), (0, "backward"), (1, "forward")])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_of_two_stages_the_one_that_made_it_is_named(schedule: str, guilty: int, fault: str, stages: list[Any]) -> None:
    """The next stage meets it as a bad input, the one before as a bad gradient: neither has made it."""
    said = [told[f"{schedule} {guilty} {fault}"]["verdict"] for told in stages]
    assert said[guilty] is not None and (said[guilty]["rank"], said[guilty]["module"]) == (guilty, "0")
    assert (said[guilty]["phase"], said[guilty]["step"]) == (fault, 1)
    if (guilty, fault) != (0, "backward"):  # of which no other stage gets anything; it may have left by then
        assert said[0] == said[1]
        assert said[0]["handed"] == f"rank {1 - guilty}"


@pytest.fixture(scope="module")
def communication(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _ran(tmp_path_factory.mktemp("communication"), "communication")


@pytest.mark.parametrize(
    "scene, by", [("by hand", "the all-reduce (float16, 2x4)"), ("sharded", "the reduce-scatter (float16, ")]
)
def test_a_sum_that_passes_the_end_of_float16_is_named_as_that(scene: str, by: str, communication: list[Any]) -> None:
    """Finite on each rank before and infinite after, with the largest number of each."""
    said = [told[scene]["verdict"] for told in communication]
    assert said[0] == said[1]
    assert (said[0]["rank"], said[0]["cause"]) == (None, "collective")
    assert f"it came out of {by}" in said[0]["why"] and "The sum passes 65 504, where float16 ends." in said[0]["why"]
    largest = [said[0]["sent"][f"by rank {rank}"] for rank in range(2)]
    assert all(20000 < size < 65504 for size in largest) and sum(largest) > 65504


def test_what_another_rank_has_sent_into_a_gather_is_its_fault(communication: list[Any]) -> None:
    for told in communication:
        verdict = told["gathered"]["verdict"]
        assert (verdict["rank"], verdict["phase"], verdict["cause"]) == (GUILTY, "input", "bad_input")
        assert "handed it by the all-gather (float16, 1x4)" in verdict["why"]


def test_a_receive_buffer_that_nobody_fills_is_named_as_that(communication: list[Any]) -> None:
    own = communication[0]["unwritten"]["own"][0]
    assert own["cause"] == "collective"
    assert (
        "it stood in the receive buffer of the all-gather (float32, 1x4) before, and nobody has written there"
        in own["why"]
    )
