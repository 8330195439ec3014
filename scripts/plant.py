"""Plants a NaN or Inf everywhere in turn, asks nanhunt where it was made, and counts right answers.

    python scripts/plant.py                                  # every module of every tiny transformers model
    python scripts/plant.py --models bert,t5 --sample 200
    python scripts/plant.py --models "" --random 100         # random nested models only

A fault is put into the output, the gradient, a weight or a buffer of every module in turn, in its own forward and
under no name of its own. What the right answer is comes from running the step without nanhunt (oracle.py): a plant
that does no harm has silence as its right answer, and what can't be decided is left out and counted by reason.
The exit code is 0 when every answer is right.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch
from nested import draw, drawn
from oracle import REASONS, Answer, Oracle, Truth
from planting import PLACES, Plant, every_plant, fingerprint, planted
from specimens import MODELS, Spec, Specimen, tiny
from tabulate import tabulate
from tqdm import tqdm

Tool = Callable[[Specimen, str], Answer | None]
DEFAULT_MODELS = tuple(MODELS)


def ask_nanhunt(specimen: Specimen, detail: str) -> Answer | None:
    """Runs the step under ``nanhunt.watch`` and reads its first finding that is a fault."""
    import nanhunt

    optimizer = specimen.optimizer()
    hunt = nanhunt.watch(specimen.model, optimizer=optimizer, detail=detail)
    try:
        with hunt:
            specimen.step(optimizer)
    except nanhunt.NonFiniteError as stop:
        if stop.finding is not hunt.finding:
            raise RuntimeError("the error and the watch disagree about the finding") from stop
    except Exception:  # the program itself died of the fault, as some do
        if hunt.finding is None:
            raise
    finding = hunt.finding
    if finding is None:
        return None
    said = finding.to_dict()
    return Answer(phase=said["phase"], module=said["module"], kind=said["kind"], tensor=said["tensor"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    plant: Plant
    truth: Truth
    answer: Answer | None = None
    error: str | None = None

    @property
    def verdict(self) -> str:
        if self.truth.excluded:
            return "excluded"
        return "right" if self.error is None and self.truth.allows(self.answer) else "wrong"

    def __str__(self) -> str:
        plant, truth = self.plant, self.truth
        place = f"{plant.specimen}: {plant.kind} in the {plant.place} of {plant.path or '(root)'} ({plant.module_type})"
        want = "silence"
        if truth.phase is not None:
            want = f"{truth.phase}, {' or '.join(map(repr, truth.modules))}, {' or '.join(truth.kinds)}"
            want += f", {' or '.join(truth.tensors)}" if truth.tensors else ""
        got = self.error or "silence"
        if self.answer is not None and not self.error:
            got = f"{self.answer.phase}, {self.answer.module!r}, {self.answer.kind}, {self.answer.tensor}"
        return f"{place}\n    expected {want}\n    got      {got}\n    harm     {', '.join(truth.harm[:4]) or 'none'}"


def judge(oracle: Oracle, plant: Plant, tool: Tool, detail: str) -> Result:
    """One plant: first what is true, without the tool, then what the tool says."""
    truth = oracle.truth(plant, detail=detail)
    if truth.excluded:
        return Result(plant=plant, truth=truth)
    answer = error = None
    with planted(oracle.specimen, plant):
        try:
            answer = tool(oracle.specimen, detail)
        except Exception as failure:  # an error of the tool is a wrong answer
            error = f"{type(failure).__name__}: {failure}"[:300]
        if truth.after and not answer and not error and fingerprint(oracle.specimen.model) != truth.after:
            error = "parameters or buffers differ from the step that nobody watched"
    return Result(plant=plant, truth=truth, answer=answer, error=error)


@functools.lru_cache(maxsize=4)
def _oracle(name: str, spec: Spec | None) -> Oracle:
    return Oracle(tiny(name) if spec is None else drawn(spec, name))


def plants_of(name: str, spec: Spec | None, seed: int, sample: int | None) -> list[Plant]:
    plants = list(every_plant(_oracle(name, spec).specimen, seed))
    if sample is not None and sample < len(plants):
        plants = random.Random(f"{seed}:{name}").sample(plants, sample)
    return plants


def run_share(
    name: str, spec: Spec | None, plants: Sequence[Plant], detail: str, tool: Tool = ask_nanhunt
) -> list[Result]:
    """The unit of work of one process: some of the plants of one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return [judge(_oracle(name, spec), plant, tool, detail) for plant in plants]


def sweep(
    specimens: Iterable[tuple[str, Spec | None]],
    *,
    seed: int = 0,
    sample: int | None = None,
    detail: str = "auto",
    jobs: int = 1,
    tool: Tool = ask_nanhunt,
    progress: Callable[[int, int, int], None] = lambda done, of, wrong: None,
) -> Iterator[Result]:
    """Every plant of every model; in processes of their own when there is more than one job."""
    shares: list[tuple[str, Spec | None, list[Plant]]] = []
    for name, spec in specimens:
        plants = plants_of(name, spec, seed, sample)
        shares += [(name, spec, plants[i : i + 60]) for i in range(0, len(plants), 60)]
    of, done, wrong = sum(len(plants) for *_, plants in shares), 0, 0

    def finished() -> Iterator[list[Result]]:
        if jobs <= 1:
            for name, spec, plants in shares:
                yield run_share(name, spec, plants, detail, tool)
            return
        start = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context(start)) as pool:
            futures = [pool.submit(run_share, name, spec, plants, detail, tool) for name, spec, plants in shares]
            for future in as_completed(futures):
                yield future.result()

    for results in finished():
        done += len(results)
        wrong += sum(result.verdict == "wrong" for result in results)
        progress(done, of, wrong)
        yield from results


def table(results: Sequence[Result]) -> str:
    """Model by place: how many were planted, left out, without harm, answered rightly and wrongly."""
    rows: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in results:
        name = result.plant.specimen.partition(":")[0]
        for key in ((name, result.plant.place), ("all", "all")):
            rows[key]["planted"] += 1
            rows[key][result.verdict] += 1
            rows[key]["harmless"] += not result.truth.excluded and result.truth.phase is None
    head = ("planted", "excluded", "harmless", "right", "wrong")
    order = sorted(rows, key=lambda key: (key[0] == "all", key[0], PLACES.index(key[1]) if key[1] in PLACES else 9))
    return tabulate([(*key, *(rows[key][h] for h in head)) for key in order], headers=("model", "place", *head))


@contextlib.contextmanager
def bar(*, quiet: bool) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar on a terminal, and nothing in a pipe."""
    with tqdm(unit=" plants", disable=True if quiet else None, dynamic_ncols=True) as shown:

        def progress(done: int, of: int, wrong: int) -> None:
            shown.total = of
            shown.set_postfix(wrong=wrong, refresh=False)
            shown.update(done - shown.n)

        yield progress


def main(argv: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary[0], epilog=summary[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help="names with commas between (default: all)")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random nested models as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, metavar="K", help="only K plants of each model")
    parser.add_argument("--detail", choices=("module", "auto", "op"), default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write every plant, its truth and the answer")
    parser.add_argument("-q", action="store_true", help="only the last line")
    options = parser.parse_args(argv)
    names = [name for name in options.models.split(",") if name]
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}; there are {', '.join(MODELS)}")
    chosen: list[tuple[str, Spec | None]] = [(name, None) for name in names]
    if options.random:
        chosen += [(f"random:{i}", spec) for i, spec in enumerate(draw(options.random, options.seed))]
    started = time.perf_counter()
    with bar(quiet=options.q) as progress:
        answers = sweep(
            chosen,
            seed=options.seed,
            sample=options.sample,
            detail=options.detail,
            jobs=options.jobs,
            progress=progress,
        )
        results = list(answers)
    return report(results, time.perf_counter() - started, quiet=options.q, json_file=options.json)


def report(results: Sequence[Result], seconds: float, *, quiet: bool, json_file: str | None) -> int:
    wrong = [result for result in results if result.verdict == "wrong"]
    excluded = collections.Counter(str(r.truth.excluded) for r in results if r.truth.excluded)
    if not quiet:
        print(table(results))
        for reason, count in excluded.most_common():
            print(f"excluded {count}: {reason}: {REASONS[reason]}")
        for result in wrong:
            print(f"WRONG {result}")
    if json_file:
        rows: list[dict[str, Any]] = [{**asdict(r), "verdict": r.verdict} for r in results]
        with open(json_file, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    asked = len(results) - sum(excluded.values())
    print(
        f"{asked - len(wrong)} of {asked} right, {sum(excluded.values())} of {len(results)} excluded, {seconds:.0f} s"
    )
    return 1 if wrong or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
