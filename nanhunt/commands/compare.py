"""`nanhunt compare`: one step with two precisions, and the module where they part."""

from __future__ import annotations

import argparse

from ..errors import UsageError, enabled

_ABOUT = """\
Calls the factory, runs its step with two precisions from the same state, and tells how alike the two runs are and in
which module they part. The factory returns a model and a step (or an example to call the model with), and any of
optimizer, scaler, batches.
"""
_SETTINGS = (
    "a dtype (float32, float16, bfloat16, float64), autocast:float16, tf32, sdpa:math, compiled, as_is, or several "
    "joined by commas"
)
_CODES = "exit code: 0 when the two agree, 1 when they do not, 2 for wrong usage."


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt compare",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("factory", metavar="module:factory", help="where to find it; also path/to/file.py:factory")
    made.add_argument(
        "--a", default="float32", metavar="SETTING", help=f"the reference (default: float32): {_SETTINGS}"
    )
    made.add_argument("--b", default="float16", metavar="SETTING", help="what is held against it (default: float16)")
    made.add_argument(
        "--batches", type=int, metavar="N", help="compare over the first N batches of the factory (default: all)"
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the record as JSON")
    form.add_argument("--html", action="store_true", help="a page for a browser, compare.html without -o")
    made.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return made


def run(options: argparse.Namespace) -> int:
    """Compare, and print or write; the exit code says whether the two agree.

    Raises:
        UsageError: for a factory, setting or file that will not do, with the reason.
    """
    from itertools import islice

    from ..report.delivery import deliver
    from ..report.files import try_file

    if options.batches is not None and options.batches < 1:
        raise UsageError(f"--batches {options.batches}: give how many batches are to be compared, 1 or more")
    out = options.output or ("compare.html" if options.html else None)
    if out is not None:
        try_file(out)
    from ..factory import make
    from ..precision.control import compare
    from ..precision.profiling import forward
    from ..precision.settings import parse

    a, b = parse(options.a, "--a"), parse(options.b, "--b")
    parts = make(options.factory)
    step, batches = parts.step, parts.batches
    if step is None:
        if parts.example is None:
            raise UsageError(
                f"{options.factory!r} gives a model and nothing to run: return (model, step), or a mapping with "
                "'model' and 'step' or 'example'"
            )
        step, batches = forward(parts.model, parts.example), None
    if options.batches is not None:
        if batches is None:
            raise UsageError(f"--batches {options.batches}: {options.factory!r} gives no batches, only one step")
        batches = list(islice(batches, options.batches))
    found = compare(parts.model, step, a=a, b=b, batches=batches, optimizer=parts.optimizer, scaler=parts.scaler)
    text = found.html() if options.html else found.to_json(indent=2) + "\n" if options.json else f"{found}\n"
    deliver(text, out, files=())
    return 0 if found.agree or not enabled() else 1
