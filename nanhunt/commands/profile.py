"""`nanhunt profile`: runs some steps and tells where their numbers lie, and whether they fit a narrower format."""

from __future__ import annotations

import argparse

from ..errors import UsageError, enabled

_ABOUT = """\
Calls the factory, runs its step a few times, and tells where the numbers of every module lie: whether the run
can move to a narrower format, which modules stand in the way, what vanishes, and what is about to overflow.
The factory returns a model and a step (or an example to call the model with), and any of optimizer, scaler, batches.
"""
_CODES = "exit code: 0 when the run can move to the dtype, 1 when it cannot, 2 for wrong usage."


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt profile",
        description=_ABOUT,
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("factory", metavar="module:factory", help="where to find it; also path/to/file.py:factory")
    made.add_argument("--steps", type=int, default=8, metavar="N", help="how many steps are run (default: 8)")
    made.add_argument("--every", type=int, default=1, metavar="N", help="profile every n-th of them only")
    made.add_argument("--sample", type=int, metavar="N", help="count at most about N numbers of each tensor")
    made.add_argument(
        "--dtype", default="float16", help="the format to move to: float16 (default), bfloat16, float8_e4m3fn, ..."
    )
    made.add_argument(
        "--loss-scale",
        type=float,
        metavar="S",
        help="what gradients are multiplied by (default: the largest power of two that fits)",
    )
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the record as JSON")
    form.add_argument("--html", action="store_true", help="a page for a browser, profile.html without -o")
    made.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return made


def run(options: argparse.Namespace) -> int:
    """Profile, and print or write; the exit code says whether the run can move.

    Raises:
        UsageError: for a factory, dtype, scale or file that will not do, with the reason.
    """
    from ..precision.spectra import scaled, target
    from ..report.delivery import deliver
    from ..report.files import try_file

    form = target(options.dtype)
    if options.loss_scale is not None:
        scaled(options.loss_scale)
    out = options.output or ("profile.html" if options.html else None)
    if out is not None:
        try_file(out)
    from ..factory import make
    from ..precision.profiling import forward, profile

    parts = make(options.factory)
    step = parts.step
    if step is None:
        if parts.example is None:
            raise UsageError(
                f"{options.factory!r} gives a model and nothing to run: return (model, step), or a mapping with "
                "'model' and 'step' or 'example'"
            )
        step = forward(parts.model, parts.example)
    batches = parts.batches if parts.step is not None else None
    found = profile(parts.model, step, steps=options.steps, batches=batches, every=options.every, sample=options.sample)
    if options.html:
        from ..report.heatmap import page

        text = page(found, dtype=form.name, loss_scale=options.loss_scale)
    elif options.json:
        text = found.to_json(indent=2) + "\n"
    else:
        from ..report.spectrum import page as terminal

        text = terminal(found, dtype=form.name, loss_scale=options.loss_scale) + "\n"
    deliver(text, out, files=())
    return 0 if found.verdict(form.name, options.loss_scale).fits or not enabled() else 1
