"""One verdict from what many ranks have recorded, and the picture of a thousand of them."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from nanhunt.cli import main
from nanhunt.consensus import consent, ranks_in_words
from nanhunt.finding import Call, Finding, TensorStats
from nanhunt.report import html, ranks


def fault(phase: str = "forward", step: int = 4, **fields: Any) -> Finding:
    context = fields.pop("context", {})
    return Finding(
        **{"phase": phase, "step": step, "module": "norm", "kind": "nan", "cause": "unknown", **fields}, context=context
    )


def handed(step: int = 4, by: str = "the all-reduce of the gradient of fc.weight", **context: Any) -> Finding:
    told = {"handed": by, "world_size": 4, **context}
    return fault("optimizer", step, module=None, tensor="fc.weight", cause="collective", context=told)


def test_the_rank_that_made_it_is_first_and_the_others_say_by_what_they_were_handed_it() -> None:
    said = consent({0: [handed()], 1: [handed()], 2: [fault()], 3: [handed()]})
    verdict = said.verdict
    assert verdict is not None and (verdict.rank, verdict.module, verdict.step) == (2, "norm", 4)
    assert verdict.why is not None and verdict.why.endswith(
        "Rank 2 was the first of 4 ranks. The others were handed it by the all-reduce of the gradient of fc.weight."
    )
    assert verdict.context["ranks"] == {"world": 4, "first": 2, "handed": "ranks 0-1 and 3", "made": "rank 2"}


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (fault(step=3), fault(step=4)),
        (fault("optimizer", step=3), fault("input", step=4)),
        (fault("forward"), fault("backward")),
        (fault("state"), fault("forward", context={"order": 3})),
        (fault("input"), fault("forward")),
        (fault("forward", context={"order": 3}), fault("forward", context={"order": 9})),
        (fault("backward", context={"order": 7}), fault("forward", context={"order": 12})),
        (fault(call=1), fault(call=2)),
        (fault("backward"), handed()),
        (fault("forward"), fault("input", context={"handed": "the stage before it"})),
        (fault("forward", step=5), handed(step=4)),
    ],
    ids=lambda finding: f"{finding.phase}-{finding.step}",
)
def test_order_is_by_step_phase_and_events(earlier: Finding, later: Finding) -> None:
    """Whichever rank it was on, and in whichever order the words arrive."""
    for words in ({0: [earlier], 1: [later]}, {1: [later], 0: [earlier]}, {0: [later], 1: [earlier]}):
        verdict = consent(words).verdict
        assert verdict is not None
        assert verdict.rank == next(rank for rank, found in words.items() if found[0] is earlier)


def test_what_is_no_fault_does_not_count() -> None:
    said = consent({0: [fault(step=1, handled="absorbed")], 1: [fault(step=2)]})
    assert said.verdict is not None and said.verdict.rank == 1
    assert (said.clean, consent({0: [], 1: []}).verdict) == ((0,), None)


def test_the_same_words_give_the_same_verdict_to_whoever_asks() -> None:
    words = {rank: [fault(context={"order": rank % 5, "world_size": 12})] for rank in range(12)}
    shuffled = dict(random.Random(3).sample(list(words.items()), 12))
    assert consent(words).verdict == consent(shuffled).verdict


def test_a_sum_that_no_rank_has_made_bad_is_told_with_what_each_has_sent() -> None:
    sent = {0: 40000.0, 1: 30000.0}
    words = {
        rank: [
            handed(
                by="the all-reduce (float16, 2x4)", world_size=2, collective={"dtype": "float16", "sent_absmax": size}
            )
        ]
        for rank, size in sent.items()
    }
    words = {rank: [dataclasses.replace(f, kind="+inf") for f in found] for rank, found in words.items()}
    verdict = consent(words).verdict
    assert verdict is not None and verdict.rank is None and verdict.cause == "collective"
    assert verdict.why == (
        "No rank has made it, it came out of the all-reduce (float16, 2x4): what went in was finite, |x| up to 40 000 "
        "on rank 0, 30 000 on rank 1. The sum passes 65 504, where float16 ends."
    )
    assert [(row.name, row.absmax) for row in verdict.tensors] == [("by rank 0", 40000.0), ("by rank 1", 30000.0)]
    assert "rank" not in verdict.title()


def test_a_rank_that_cannot_be_asked_is_named_and_may_have_made_it() -> None:
    verdict = consent({0: [handed()], 1: [handed()], 3: [handed()]}).verdict
    assert verdict is not None and verdict.rank is None
    assert verdict.why is not None and "rank 2 may have" in verdict.why
    assert verdict.context["ranks"]["unheard"] == "rank 2"


def test_ranks_in_words_stay_short() -> None:
    assert ranks_in_words([]) == ""
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([7, 0, 2, 3, 4]) == "ranks 0, 2-4 and 7"
    assert ranks_in_words(range(0, 1000, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (500 of them)"


# --- files ------------------------------------------------------------------------------------------


def big(finding: Finding, rank: int) -> Finding:
    """As large as those of a real model."""
    rows = tuple(
        TensorStats(role="weight", name=f"layer.{n}.weight", shape=(64, 64), dtype="float32", absmax=1.5, nan=0,
                    exponents=(-20, tuple(range(24))), headroom={"float16": 15.4, "bfloat16": 127.4})
        for n in range(8)
    )  # fmt: skip
    trail = tuple(
        Call(module=f"blocks.{n}.mlp", module_type="Linear", absmax_in=1.0, absmax_out=2.0) for n in range(21)
    )
    outline = {"rows": [[n % 7, f"blocks.{n}", "Block", 1] for n in range(120)]}
    context = {**finding.context, "world_size": 1000, "host": f"node{rank // 8}", "modules": outline}
    return dataclasses.replace(finding, rank=rank, tensors=rows, trail=trail, context=context)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of 1 000 ranks: 417 was first, one file is missing, one torn, one is of a rank that saw nothing."""
    folder = tmp_path_factory.mktemp("thousand")
    later = fault("state", step=5, tensor="fc.weight", cause="bad_parameter")
    for rank in range(1000):
        first = fault(step=4, context={"order": 9}) if rank == 417 else handed(step=4)
        found = [big(first, rank), big(later, rank)] if rank != 5 else []
        text = json.dumps([one.to_dict() for one in found])
        if rank == 13:
            text = text[: len(text) // 2]
        if rank != 600:
            (folder / f"finding.rank{rank}.json").write_text(text)
    return folder


def test_a_thousand_ranks_are_told_in_five_seconds(thousand: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One verdict, and a picture of a few lines, although one file is missing and one is torn."""
    began = time.process_time()
    assert main(["show", str(thousand)]) == 1
    assert time.process_time() - began < 5.0
    said = capsys.readouterr()
    assert said.out.startswith("norm made the first nan, in forward, step 4, on rank 417\n")
    picture = said.out.partition("Ranks by step")[2].splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in picture[1:6]] == [
        ["ranks", "step 2", "3", "4", "5"],
        ["rank 417", ".", ".", "X", "o"],
        ["ranks 0-4, 6-12, 14-416, 418-599 and 601-999", ".", ".", "o", "o"],
        ["ranks 13 and 600", "?", "?", "?", "?"],
        ["rank 5", ".", ".", ".", "."],
    ]
    assert "1 000 ranks: 997 with a fault (996 only handed it), 1 clean, nothing known of ranks 13 and 600." in said.out
    assert "finding.rank13.json" in said.err and "is not JSON" in said.err
    assert len(said.out.splitlines()) < 80


def test_a_thousand_ranks_fit_on_one_page(thousand: Path, tmp_path: Path) -> None:
    began = time.process_time()
    assert main(["show", "--html", "-o", str(tmp_path / "all.html"), str(thousand)]) == 1
    assert time.process_time() - began < 5.0
    page = (tmp_path / "all.html").read_text()
    assert len(page) < 500_000
    assert 'class="rank-first"' in page and page.count("<rect") < 400 and "finding.rank13.json" in page


def test_a_page_of_ranks_that_all_went_different_ways_stays_small() -> None:
    generator = random.Random(1)
    words = {rank: [fault(step=generator.randrange(12))] for rank in range(1000)}
    assert len(html.of_ranks(consent(words))) < 500_000
    lines = ranks.text(consent(words)).splitlines()
    assert len(lines) < 24 and all(len(line) <= 100 for line in lines)


def test_no_fault_on_any_rank_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        (tmp_path / f"finding.rank{rank}.json").write_text("[]")
    assert main(["show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("no rank has a fault") and "3 ranks: 0 with a fault, 3 clean." in said


def test_torn_files_without_a_fault_in_the_others_are_no_clean_bill(tmp_path: Path) -> None:
    for rank, text in enumerate(("[]", "[]", '[{"format"')):
        (tmp_path / f"finding.rank{rank}.json").write_text(text)
    assert main(["show", str(tmp_path)]) == 2


def test_each_start_of_an_elastic_job_is_judged_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a restart steps are counted anew: the second start must not look earlier than the first."""
    for rank in range(2):
        first = fault(step=90) if rank else handed(step=90, world_size=2)
        again = dataclasses.replace(fault(step=2, module="other"), context={"restart": 1}) if not rank else None
        (tmp_path / f"finding.rank{rank}.json").write_text(json.dumps([first.to_dict()]))
        (tmp_path / f"finding.rank{rank}.restart1.json").write_text(json.dumps([again.to_dict()] if again else []))
    assert main(["show", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("norm made the first nan, in forward, step 90, on rank 1")
    assert "start 2 of the job: other made the first nan, in forward, step 2, on rank 0" in said


def test_files_of_one_process_are_shown_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(fault().to_json())
    assert main(["show", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "2 of 2" in capsys.readouterr().out
