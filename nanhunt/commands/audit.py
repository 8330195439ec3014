"""`nanhunt audit`: what is wrong with a model, its optimizer and its step, before the first step."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..remarks import RULES, known

if TYPE_CHECKING:
    from ..factory import Parts

_ABOUT = """\
Calls the factory and says what is wrong before the first step: numbers in weights and buffers, an eps or a mask that
its format cannot hold, an optimizer that does not fit the precision, the order of scale, clip and step. The factory
returns a model, and any of optimizer, scaler, example (what the model is called with), step and batches; a step or an
example runs once, and what it changes is put back.
"""
_CODES = "exit code: 0 when nothing is wrong, 1 when something is, 2 for wrong usage."


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt audit",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("factory", metavar="module:factory", help="where to find it; also path/to/file.py:factory")
    made.add_argument(
        "--autocast",
        choices=("float16", "bfloat16"),
        help="run the example under autocast to this dtype (a step opens its own)",
    )
    made.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="RULE",
        help=f"say nothing of this rule; may be given several times: {', '.join(RULES)}",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the remarks as JSON")
    form.add_argument("--html", action="store_true", help="a page for a browser, audit.html without -o")
    made.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return made


def run(options: argparse.Namespace) -> int:
    """Audit, and print or write; the exit code says whether something is wrong.

    Raises:
        UsageError: for a factory, rule or file that will not do, with the reason.
    """
    from ..report.delivery import deliver
    from ..report.files import try_file

    ignore = known(options.ignore)
    out = options.output or ("audit.html" if options.html else None)
    if out is not None:
        try_file(out)
    from ..auditing.front import audit
    from ..factory import make

    parts = make(options.factory)
    found = audit(
        parts.model,
        parts.optimizer,
        parts.scaler,
        autocast=options.autocast,
        ignore=ignore,
        **_runs(parts),
    )
    if options.html:
        from ..report.remarks import html

        text = html(found)
    elif options.json:
        text = found.to_json(indent=2) + "\n"
    else:
        text = f"{found}\n"
    deliver(text, out, files=())
    return 1 if found else 0


def _runs(parts: Parts) -> dict[str, Any]:
    """What is run: the step, which shows most, with the first batch where there are some; else the example."""
    if parts.step is not None:
        if parts.batches is None:
            return {"step": parts.step}
        if not len(parts.batches):
            raise UsageError("the factory gives no batch: put at least one into 'batches', or leave it out")
        return {"step": functools.partial(parts.step, parts.batches[0])}
    return {"example": parts.example}
