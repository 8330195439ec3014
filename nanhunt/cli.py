"""The command line: `nanhunt train.py`, and the commands."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from . import arguments
from .closing import try_report
from .errors import NanhuntError, UsageError, enabled
from .launcher import Launch
from .program import CannotRun, Program
from .report.files import try_folder
from .report.lines import clean

FOUND, USAGE = 1, 2

# The words that are commands: each has a file in commands/, loaded when the word is used.
COMMANDS = ("audit", "compare", "demo", "log", "profile", "replay", "show")


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
    if given[0] in COMMANDS:
        return _command(given[0], given[1:])
    ours, program = arguments.split(given, parser, words=COMMANDS)
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
    command = importlib.import_module(f".commands.{name}", __package__)
    options = command.parser().parse_args(given)
    try:
        return int(command.run(options))
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
        "capsule": None if options.capsule is None else os.path.abspath(options.capsule),  # it may change its folder
        "max_mb": options.max_mb,
        "slim": options.slim,
        "ring": options.ring,
    }
    try:
        if enabled() and report is not None:
            try_report(report)
        if enabled() and options.capsule is not None:
            try_folder(options.capsule)
    except UsageError as error:
        return _refuse(str(error))
    return Launch(options=asked, report=report, quiet=options.quiet).run(program)


def _refuse(message: str) -> int:
    print("\n".join(clean(line) for line in f"nanhunt: error: {message}".split("\n")), file=sys.stderr)
    return USAGE
