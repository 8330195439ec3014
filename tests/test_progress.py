"""A sweep shows a bar on a terminal, and nothing in a pipe."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
if not SCRIPTS.is_dir():
    pytest.skip("the scripts of the repository are not here", allow_module_level=True)
sys.path.insert(0, str(SCRIPTS))

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

import plant  # noqa: E402

SWEEP = ["--models", "", "--random", "2", "--sample", "3", "--detail", "module"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.filterwarnings("ignore")
def test_a_terminal_gets_a_bar_and_a_pipe_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed on stdout is the same either way; `-q` is quiet on a terminal too."""
    said = []
    for stderr, options in ((Terminal(), []), (io.StringIO(), []), (Terminal(), ["-q"])):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert plant.main([*SWEEP, *options]) == 0
        said.append((stderr.getvalue(), capsys.readouterr().out.rpartition(", ")[0]))
    (bar, table), (nothing, same_table), (quiet, last) = said
    assert "6/6" in bar and "wrong=0" in bar and "100%" in bar
    assert nothing == "" and quiet == ""
    assert table == same_table and last in table and "\n" not in last
