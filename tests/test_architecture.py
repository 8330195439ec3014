"""The shape of the package: what imports what, where hooks are registered, what an import costs."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import nanhunt

PACKAGE = pathlib.Path(nanhunt.__file__).parent

# From the ground up: a file imports only from lines above its own, at the top of the file.
FLOORS = """
numerics
errors
listing
finding
remarks
outline
consensus
verdict
evidence
families
phrases
advice
forward_rules
update_rules
causes
coarse
ranges
headroom
report.files
report.delivery
report.lines
report.paint
report.progress
report.table
report.words
report.text
report.markup
report.axis
report.ruler
report.trail
report.tree
report.numbers
report.sheet
report.ranks
report.html
report.remarks
symptoms.steps
symptoms.course
symptoms.levels
symptoms.thinning
symptoms.counsel
symptoms.headway
symptoms.rises
symptoms.scale_course
symptoms.stillness
symptoms.breaks
symptoms.wobble
symptoms.diagnosis
report.extent
report.dots
report.course_words
report.course_text
report.curves
report.course_page
monitor.journal
monitor.scales
monitor.shares
monitor.record
logs.spellings
logs.names
logs.entry
logs.events
logs.dialects
logs.values
logs.shapes
logs.source
logs.tables
logs.objects
logs.boards
logs.merging
logs.lane
logs.assembly
logs.reader
logs.reading
precision.figures
precision.likeness
precision.spectra
precision.forecast
precision.profiles
precision.narrowing
report.likeness
report.along
report.spectrum
report.heatmap
leaves
batches
internals
probe
ranks
frames
sites
naming
dynamo
traces
scripts
compiled
options
hits
literals
wires
hooks
recorder
meter
schemas
runs
births
marks
owners
makers
nodes
places
witness
lineage
tracer
calls
looks
moved
arrivals
oplevel
ambient
kept
replay
rerun
scaling
state
judge
regions
collectives
observer
scene
filing
tidings
among
watcher
precision.exponents
precision.ledger
precision.sightings
precision.profiler
precision.alike
precision.references
precision.strict
precision.settings
precision.boundaries
precision.passes
precision.alone
precision.control
precision.profiling
capsule.safe_tensors
capsule.cargo
capsule.unpacked
capsule.op_list
capsule.rebuild
capsule.catch
capsule.reproduction
capsule.writing
capsule.rehearsal
capsule.reading
capsule.running
capsule.culprit
capsule.ceiling
monitor.readback
monitor.gradients
monitor.updates
monitor.holding
monitor.measured
monitor.draft
monitor.pace
monitor.terms
monitor.front
auditing.grain
auditing.groups
auditing.ops
auditing.tensors
auditing.norms
auditing.optimizers
auditing.updates
auditing.scalers
auditing.epses
auditing.masks
auditing.halves
auditing.undone
auditing.custom
auditing.sums
auditing.scaled
auditing.trial
auditing.front
watching
capsule.replaying
capsule.bisecting
capsule.slimming
away
roots
hunter
monitor.followup
integrations.span
integrations.recording
integrations.transformers
integrations.lightning
pytest_settings
pytest_reports
pytest_precision
pytest_trial
pytest_plugin
factory
demo
commands.show
commands.log
commands.compare
commands.profile
commands.demo
commands.audit
commands.replay
program
closing
word
launcher
arguments
cli
__main__
""".split()

# The half that knows nothing of torch.
NO_TORCH = FLOORS[: FLOORS.index("leaves")]

# `TYPE_CHECKING` imports name types; imports inside functions load what a healthy run does not need.
LATE = {
    ("finding", "report.text"),
    ("finding", "report.html"),
    ("report.files", "finding"),
}


def _name(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts)


def _files() -> dict[str, pathlib.Path]:
    return {_name(p): p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}


def _imports(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports when it is loaded."""
    inside = path.parent.relative_to(PACKAGE).parts
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = inside[: len(inside) - node.level + 1]
        stem = ".".join((*base, *(node.module or "").split("."))).strip(".")
        names = [stem] if node.module else [".".join((*base, alias.name)) for alias in node.names]
        if node.module and (PACKAGE / pathlib.Path(*stem.split("."))).is_dir():
            names = [f"{stem}.{alias.name}" for alias in node.names]
        found.update(names)
    return found


def test_every_file_has_its_floor() -> None:
    assert sorted(_files()) == sorted(FLOORS)


def test_a_file_imports_only_from_floors_below_it() -> None:
    wrong = [
        (name, other)
        for name, path in _files().items()
        for other in _imports(path)
        if other in FLOORS and FLOORS.index(other) >= FLOORS.index(name) and (name, other) not in LATE
    ]
    assert wrong == []


def test_the_walk_over_imports_sees_them() -> None:
    """Guards the test above: it would pass on an empty answer."""
    assert {"finding", "numerics"} <= _imports(PACKAGE / "report" / "text.py") | _imports(PACKAGE / "coarse.py")
    assert "judge" in _imports(PACKAGE / "watcher.py")


def test_the_ground_floors_know_nothing_of_torch() -> None:
    code = f"import sys, importlib; [importlib.import_module('nanhunt.' + n) for n in {NO_TORCH!r}]; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hooks_are_registered_in_one_file() -> None:
    """Others that must look on do so through it; a snapshot has its own eye on optimizer steps, and takes it off."""
    words = ("register_hook(", "register_module_forward", "register_post_accumulate", "register_optimizer_step")
    found = {name for name, path in _files().items() if any(f".{w}" in path.read_text() for w in words)}
    assert found <= {"hooks"}


def test_no_file_is_a_book() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in _files().items()}
    assert {name: n for name, n in lengths.items() if n > 460} == {}


def test_every_file_says_what_it_is_in_one_line() -> None:
    for name, path in _files().items():
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc and len(doc.splitlines()[0]) < 120, name
