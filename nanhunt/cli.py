"""The command line: `nanhunt train.py`, `nanhunt show FILE...`, `nanhunt demo`."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import arguments
from .closing import try_report
from .errors import NanhuntError, UsageError, enabled
from .launcher import Launch
from .program import CannotRun, Program

if TYPE_CHECKING:
    from .finding import Finding

CLEAN, FOUND, USAGE = 0, 1, 2

_DEMO = """\
Trains a small character transformer on text that comes with Python, in float16 autocast on the CPU, and
raises its learning rate until an activation no longer fits into float16. Nothing is planted: the overflow
comes from the training. Ends with exit code 0.
"""
_SHOW = """\
Prints findings that were saved with Finding.to_json() or by a run under nanhunt: a file holds one, a list of
them, or one on each line.
"""
_CODES = "exit code: 0 when no file holds a fault, 1 when one does, 2 when a file cannot be read."

_as_written = argparse.RawDescriptionHelpFormatter


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command or a program and return the exit code.

    Raises:
        SystemExit: 2 for wrong usage, as argparse does it; what a program ends with.
        BaseException: what a program dies of.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = arguments.parser()
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    if given[0] in _COMMANDS:
        return _command(given[0], given[1:])
    ours, program = arguments.split(given, parser, words=_COMMANDS)
    options = parser.parse_args(ours)
    if program is None:
        parser.error("name a program to run: a script, -m module or -c code (python -m nanhunt --help)")
    try:
        return _launch(options, program)
    except CannotRun as error:
        return _refuse(str(error))


def _command(name: str, given: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a module may bear a name that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    parser, run = _COMMANDS[name]
    options = parser().parse_args(given)
    try:
        return run(options)
    except NanhuntError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # `nanhunt show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND


# --- a program --------------------------------------------------------------------------------------


def _launch(options: argparse.Namespace, program: Program) -> int:
    report = options.report
    asked = {
        "detail": options.detail,
        "on_hit": options.on_hit,
        "stop": options.stop,
        "steps": options.steps,
        "every": options.every,
        "kinds": options.kinds,
        "allow": tuple(options.allow),
        "backward": options.backward,
        "compiled": "eager" if options.compiled == "eager" else "error",
    }
    try:
        if enabled() and report is not None:
            try_report(report)
    except UsageError as error:
        return _refuse(str(error))
    return Launch(options=asked, report=report, quiet=options.quiet).run(program)


# --- commands ---------------------------------------------------------------------------------------


def _demo_parser() -> argparse.ArgumentParser:
    demo = argparse.ArgumentParser(
        prog="nanhunt demo", description=_DEMO, formatter_class=_as_written, allow_abbrev=False
    )
    demo.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="what the model computes in (default: float16, which overflows)",
    )
    demo.add_argument("--save", metavar="FILE", help="write the finding to FILE: a page if it ends in .html, else JSON")
    return demo


def _demo(options: argparse.Namespace) -> int:
    if not enabled():
        print("nanhunt is switched off by NANHUNT=0: unset it to see the demo")
        return CLEAN
    from .report.files import try_file, write_whole

    if options.save is not None:  # not after half a minute of training
        try_file(options.save)
    from . import demo

    finding = demo.run(dtype=options.dtype, say=functools.partial(print, flush=True))
    if options.save is not None and finding is None:
        print(f"nothing was found, so {options.save} was not written")
    elif options.save is not None and finding is not None:
        from .report.html import page

        text = page(finding) if options.save.endswith(".html") else finding.to_json(indent=2) + "\n"
        try:
            print(f"saved in {write_whole(options.save, text)}")
        except OSError as error:
            return _refuse(f"cannot write {options.save!r}: {error.strerror or error}")
    return CLEAN


def _show_parser() -> argparse.ArgumentParser:
    show = argparse.ArgumentParser(
        prog="nanhunt show", description=_SHOW, epilog=_CODES, formatter_class=_as_written, allow_abbrev=False
    )
    show.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a file of findings in JSON, a folder of reports (its *.json files), or - for standard input",
    )
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all findings as one JSON list")
    form.add_argument(
        "--html",
        action="store_true",
        help="all findings as one page for a browser, written next to the first FILE: a.json gives a.html",
    )
    show.add_argument("-o", "--output", metavar="OUT", help="write to the file OUT instead")
    return show


def _show(options: argparse.Namespace) -> int:
    from .report.files import in_folder, read_findings, write_whole

    files = [file for name in options.files for file in (in_folder(name) if os.path.isdir(name) else [name])]
    read: list[tuple[str, Finding]] = []
    for name in files:
        try:
            read += [(name, finding) for finding in read_findings(name)]
        except OSError as error:
            return _refuse(f"cannot read {name!r}: {error.strerror or error}")
    out = options.output
    if options.html:
        from .report.html import pages

        text = pages([finding for _, finding in read])
        if out is None and files[0] == "-":
            return _refuse("a page of what is read from standard input needs a name: add -o OUT")
        out = out or os.path.splitext(files[0])[0] + ".html"
    elif options.json:
        text = json.dumps([finding.to_dict() for _, finding in read], indent=2, allow_nan=False) + "\n"
    else:
        text = _texts(files, read)
    if out is None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python would try once more at its end
            return _refuse(f"cannot write to standard output: {error.strerror or error}")
    elif os.path.realpath(out) in map(os.path.realpath, files):
        return _refuse(f"{out!r} is read and would be written: name another file with -o")
    else:
        try:
            print(f"written to {write_whole(out, text)}")
        except OSError as error:
            return _refuse(f"cannot write {out!r}: {error.strerror or error}")
    return FOUND if any(finding.handled is None for _, finding in read) else CLEAN


def _texts(files: list[str], read: list[tuple[str, Finding]]) -> str:
    from .report.text import page

    if not read:
        return f"no finding in {', '.join('standard input' if name == '-' else name for name in files)}\n"
    said = []
    for at, (name, finding) in enumerate(read, 1):
        heading = f"{'' if at == 1 else chr(10)}{at} of {len(read)}: {name}\n\n" if len(read) > 1 else ""
        said.append(f"{heading}{page(finding)}\n")
    return "".join(said)


def _refuse(message: str) -> int:
    print(f"nanhunt: error: {message}", file=sys.stderr)
    return USAGE


# A command's word: its options, and what it does with them.
_COMMANDS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "demo": (_demo_parser, _demo),
    "show": (_show_parser, _show),
}
