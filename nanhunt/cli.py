"""The command line: `nanhunt demo`, `nanhunt show FILE...`."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .errors import NanhuntError, enabled
from .finding import Finding
from .report.files import read_findings, write_whole
from .report.text import page

CLEAN, FOUND, USAGE = 0, 1, 2

_ABOUT = """\
Finds where the first NaN or Inf of a PyTorch step was made: which module, which operation, with which
numbers, and what to do about it.

In a program, around any number of steps (results are not changed, bit for bit):

    import nanhunt
    with nanhunt.watch(model):
        train(model)
"""
_EXAMPLES = """\
examples:
  python -m nanhunt demo                     see a real float16 overflow found, in under a minute
  python -m nanhunt demo --save a.json       and keep the finding
  python -m nanhunt show a.json b.json       read saved findings again
  python -m nanhunt show --json a.json       the same for programs

NANHUNT=0 in the environment turns every watch in a program off, NANHUNT=1 is the default.
"""
_DEMO = """\
Trains a small character transformer on text that comes with Python, in float16 autocast on the CPU, and
raises its learning rate until an activation no longer fits into float16. Nothing is planted: the overflow
comes from the training. Ends with exit code 0.
"""
_SHOW = """\
Prints findings that were saved with Finding.to_json(): a file holds one, a list of them, or one on each line.
"""
_CODES = "exit code: 0 when no file holds a fault, 1 when one does, 2 when a file cannot be read."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; wrong usage ends in SystemExit(2), as argparse does it."""
    given = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a module may bear a name that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    parser, commands = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    if not given[0].startswith("-") and given[0] not in commands:
        parser.error(f"there is no command {given[0]!r}: use {' or '.join(commands)} (python -m nanhunt --help)")
    options = parser.parse_args(given)
    try:
        return commands[options.command](options)
    except NanhuntError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # `nanhunt show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Callable[[argparse.Namespace], int]]]:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="nanhunt", description=_ABOUT, epilog=_EXAMPLES, formatter_class=as_written, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"nanhunt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small model until it overflows, and see it found",
        description=_DEMO,
        formatter_class=as_written,
        allow_abbrev=False,
    )
    demo.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="what the model computes in (default: float16, which overflows)",
    )
    demo.add_argument("--save", metavar="FILE", help="write the finding to FILE, as JSON")

    show = commands.add_parser(
        "show",
        help="print saved findings",
        description=_SHOW,
        epilog=_CODES,
        formatter_class=as_written,
        allow_abbrev=False,
    )
    show.add_argument("files", metavar="FILE", nargs="+", help="a file of findings in JSON")
    show.add_argument("--json", action="store_true", help="print all findings as one JSON list")
    return parser, {"demo": _demo, "show": _show}


def _demo(options: argparse.Namespace) -> int:
    if not enabled():
        print("nanhunt is switched off by NANHUNT=0: unset it to see the demo")
        return CLEAN
    if options.save is not None and os.path.isdir(options.save):  # not after half a minute of training
        return _refuse(f"cannot write to {options.save!r}: it is a folder; name a file in it")
    from . import demo

    finding = demo.run(dtype=options.dtype, say=functools.partial(print, flush=True))
    if options.save is not None and finding is None:
        print(f"nothing was found, so {options.save} was not written")
    elif options.save is not None and finding is not None:
        try:
            print(f"saved in {write_whole(options.save, finding.to_json(indent=2) + chr(10))}")
        except OSError as error:
            return _refuse(f"cannot write {options.save!r}: {error.strerror or error}")
    return CLEAN


def _show(options: argparse.Namespace) -> int:
    read: list[tuple[str, Finding]] = []
    for name in options.files:
        try:
            read += [(name, finding) for finding in read_findings(name)]
        except OSError as error:
            return _refuse(f"cannot read {name!r}: {error.strerror or error}")
    if options.json:
        print(json.dumps([finding.to_dict() for _, finding in read], indent=2, allow_nan=False))
    elif not read:
        print(f"no finding in {', '.join(options.files)}")
    else:
        for at, (name, finding) in enumerate(read, 1):
            if len(read) > 1:
                print(f"{'' if at == 1 else chr(10)}{at} of {len(read)}: {name}\n")
            print(page(finding))
    return FOUND if any(finding.handled is None for _, finding in read) else CLEAN


def _refuse(message: str) -> int:
    print(f"nanhunt: error: {message}", file=sys.stderr)
    return USAGE
