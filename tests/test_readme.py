"""The README is true: its programs run, its page is what is printed, its tables and links match the code.

`python -m tests.test_readme` writes the page and the map anew.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import nanhunt
from nanhunt.causes import CAUSES

from .test_architecture import FLOORS, NO_TORCH

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nanhunt"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CAUSES_PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (?P<how>setup|run|run: \w+) -->\n```python\n(?P<code>.*?)```\n", re.DOTALL)
PAGE = re.compile(r"(?<=<!-- PAGE -->\n```text\n).*?(?=```\n)", re.DOTALL)
MAP = re.compile(r"(?<=<!-- FILE-MAP -->\n).*?(?=<!-- /FILE-MAP -->)", re.DOTALL)
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+) \|$", re.MULTILINE)
INSTALLED = any(entry.value == "nanhunt.pytest_plugin" for entry in entry_points(group="pytest11"))
HOME = "/home/you"  # stands in the README's page for the folder that the program ran in

BLOCKS = [(block["how"], block["code"]) for block in BLOCK.finditer(README)]
SETUP = "".join(code for how, code in BLOCKS if how == "setup")
STOPS = "".join(code for how, code in BLOCKS if how == "run: stops")
RECIPES = [(how, code) for how, code in BLOCKS if how in ("run", "run: pytest")]


def program(
    folder: Path, code: str, *, name: str = "encoder.py", pytest: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a block as a user would: a file of its own, in a process of its own."""
    (folder / name).write_text(code, encoding="utf-8")
    known = {key: value for key, value in os.environ.items() if key not in ("NANHUNT", "FORCE_COLOR")}
    path = os.pathsep.join(part for part in (str(ROOT), known.get("PYTHONPATH")) if part)
    # A stored range file is what a recipe of `check_ranges` begins with; a plugin that is installed loads itself.
    plugin = [] if INSTALLED else ["-p", "nanhunt.pytest_plugin"]
    testing = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "--nanhunt-update"]
    command = [sys.executable, *(testing if pytest else []), str(folder / name)]
    return subprocess.run(
        command,
        cwd=folder,
        env=known | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def printed(folder: Path) -> str:
    """The page of the first program, which ends its traceback."""
    ran = program(folder, STOPS)
    assert ran.returncode == 1, ran.stderr
    head, _, page = ran.stderr.partition("nanhunt.errors.NonFiniteError: ")
    assert "Traceback" in head and page, ran.stderr
    return page.rstrip("\n").replace(str(folder), HOME) + "\n"


def shape(page: str) -> list[str]:
    """A page without its numbers: the last digits, and so the widths, differ from one processor to the next."""
    plain = re.sub(r"(?<![\w.])[-+]?\d[\d.]*(?:e[-+]?\d+)?(?: \d{3})*%?", "N", re.sub(r"torch \S+,", "torch V,", page))
    plain = re.sub(r"batch\s+hash\s+\w+", "batch hash H", plain)
    return re.sub(r"[ \t]+", " ", plain).splitlines()


@pytest.mark.parametrize(("how", "code"), RECIPES, ids=[f"{n:02d}" for n in range(len(RECIPES))])
def test_recipe_runs(how: str, code: str, tmp_path: Path) -> None:
    """Each block runs after the set-up block, without an error and without a complaint of nanhunt's own."""
    ran = program(tmp_path, SETUP + code, name="test_recipe.py", pytest=how == "run: pytest")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "internal error" not in ran.stderr and "no call of the model" not in ran.stderr, ran.stderr


def test_every_block_of_python_is_run() -> None:
    """Only the three lines of the first screen, in which the training is the reader's own, are not."""
    assert STOPS and SETUP and len(RECIPES) >= 12
    assert README.count("```python\n") == len(BLOCKS) + 1


def test_page_is_what_is_printed(tmp_path: Path) -> None:
    """The page on the first screen is what its program prints today, and short enough for one."""
    shown = PAGE.search(README)
    assert shown is not None
    assert 20 <= len(shown[0].splitlines()) < 45
    assert shape(printed(tmp_path)) == shape(shown[0]), "run python -m tests.test_readme to paste it anew"


def test_set_up_commands_are_there_word_for_word() -> None:
    venv = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt"
    assert f"\n{venv} . && .venv/bin/python -m nanhunt demo\n" in README
    assert f"\n{venv} -e '.[test]' && .venv/bin/python -m pytest -n 2\n" in README


def test_every_option_of_watch_is_told_with_its_default() -> None:
    rows: dict[str, str] = {}
    for row in README.partition("## Options of `watch`")[2].partition("\n## ")[0].splitlines():
        names, *_, default = (
            (cell.strip() for cell in row.strip("|").split(" | ")) if row.startswith("| `") else ("", "")
        )
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    options = [p for p in inspect.signature(nanhunt.watch).parameters.values() if not p.name.startswith("_")][1:]
    assert list(rows) == [p.name for p in options]
    for option in options:
        if isinstance(option.default, str):
            assert rows[option.name] == f'`"{option.default}"`'


def test_every_cause_word_has_a_row_and_a_section() -> None:
    """In the order of the list; nothing that the list does not have."""
    rows = re.findall(r"^\| \[`(\w+)`\]\(docs/causes\.md#(\w+)\) \| (.+) \|$", README, re.MULTILINE)
    assert [word for word, _, _ in rows] == [anchor for _, anchor, _ in rows] == list(CAUSES)
    parts = re.split(r"^## (\w+)\n", CAUSES_PAGE, flags=re.MULTILINE)
    assert parts[1::2] == list(CAUSES)
    for section in parts[2::2]:
        assert [f"**{word}.**" in section for word in ("Meaning", "Decided", "Cure")] == [True] * 3, section


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#\w+)?\)", README):
        assert (ROOT / target).is_file(), target


def test_changelog_tells_of_this_version() -> None:
    assert f"\n## [{nanhunt.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- the map of files -------------------------------------------------------------------------------


def mapped() -> list[tuple[str, str]]:
    """The (file, caption) rows of the map."""
    found = MAP.search(README)
    assert found is not None
    return ROW.findall(found[0])


def caption(file: str) -> str:
    """The first docstring line of a file of the package."""
    return (ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or "").split("\n")[0]


def test_map_shows_every_file_with_its_caption() -> None:
    rows = mapped()
    there = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    assert sorted(file for file, _ in rows) == there
    wrong = [f"{file}: {told!r}, its docstring says {caption(file)!r}" for file, told in rows if told != caption(file)]
    assert not wrong, "run python -m tests.test_readme to write them anew: " + "; ".join(wrong)


def floors(rows: list[tuple[str, str]]) -> list[str]:
    """The rows as test_architecture names files, which leaves out what only gathers names."""
    return [file[:-3].replace("/", ".") for file, _ in rows if not file.endswith("__init__.py")]


def test_map_is_in_the_order_of_import() -> None:
    """A file imports, when it is loaded, only from lines above it."""
    assert floors(mapped()) == FLOORS


def test_first_group_of_the_map_is_the_half_without_torch() -> None:
    found = MAP.search(README)
    assert found is not None
    groups = found[0].split("\n**")
    assert "no torch" in groups[0]
    assert floors(ROW.findall(groups[0])) == NO_TORCH


def rewrite() -> None:
    """Paste the page and the map as they are today; a new file goes to the group of the one that it follows."""
    with tempfile.TemporaryDirectory() as folder:
        text = PAGE.sub(lambda _: printed(Path(folder).resolve()), README, count=1)
    old = MAP.search(text)
    assert old is not None
    shown: dict[str, list[str]] = {group: floors(ROW.findall(group)) for group in old[0].split("\n**")}
    where, last = {name: group for group, names in shown.items() for name in names}, next(iter(shown))
    there: dict[str, list[str]] = {group: [] for group in shown}
    for name in FLOORS:
        last = where.get(name, last)
        there[last].append(name.replace(".", "/") + ".py")
    new = []
    for group, files in there.items():
        heading = group[: group.index("| `")]
        gatherers = [file for file, _ in ROW.findall(group) if file.endswith("__init__.py")]
        for file in gatherers:
            inside = [n for n, other in enumerate(files) if other.startswith(file.removesuffix("__init__.py"))]
            files.insert(inside[0] if "/" in file and inside else len(files), file)
        new.append(heading + "".join(f"| `{file}` | {caption(file)} |\n" for file in files))
    (ROOT / "README.md").write_text(text.replace(old[0], "\n**".join(new)), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
