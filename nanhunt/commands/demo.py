"""`nanhunt demo`: a real overflow, found in under a minute."""

from __future__ import annotations

import argparse
import functools

from ..errors import UsageError, enabled

_ABOUT = """\
Trains a small character transformer on text that comes with Python, in float16 autocast on the CPU, and
raises its learning rate until an activation no longer fits into float16. Nothing is planted: the overflow
comes from the training. Ends with exit code 0.
"""


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(
        prog="nanhunt demo",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="what the model computes in (default: float16, which overflows)",
    )
    made.add_argument("--save", metavar="FILE", help="write the finding to FILE: a page if it ends in .html, else JSON")
    return made


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0.

    Raises:
        UsageError: when the file to save it in cannot be written.
    """
    if not enabled():
        print("nanhunt is switched off by NANHUNT=0: unset it to see the demo")
        return 0
    from ..report.files import try_file, write_whole

    if options.save is not None:  # not after half a minute of training
        try_file(options.save)
    from .. import demo

    finding = demo.run(dtype=options.dtype, say=functools.partial(print, flush=True))
    if options.save is not None and finding is None:
        print(f"nothing was found, so {options.save} was not written")
    elif options.save is not None and finding is not None:
        from ..report.html import page

        text = page(finding) if options.save.endswith(".html") else finding.to_json(indent=2) + "\n"
        try:
            print(f"saved in {write_whole(options.save, text)}")
        except OSError as error:
            raise UsageError(f"cannot write {options.save!r}: {error.strerror or error}") from None
    return 0
