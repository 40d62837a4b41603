"""Argument parser and error handling of the command line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from typing_extensions import override

from lightning_recorder.commands.text import printable
from lightning_recorder.errors import RecorderError

__all__ = ["main"]

_PROGRAM = "lightning-recorder"
_PATH = "the log_dir of a run, its folder recorder, or a folder above several runs"
_TOLERANCE = """\
Two numbers are the same if they are apart by no more than ATOL + RTOL times what they are measured by: the larger
rms of the site for mean, std, rms, min, max and quantiles, so that a mean that happens to be near zero is no
difference; 1 for shares; else the larger of the two. Counts have to be equal. A site whose rms is below ATOL in both
runs is taken for zero, as the gradient of a bias before a BatchNorm, which is nothing but rounding.

The defaults are such that the same run with another number of threads is the same at its beginning: there the
statistics of a small convolutional network were apart by 1e-6 to 3e-4 in its first five steps, and by 3e-6 after 80
steps of SGD. They grow with training: with Adam some were beyond 1e-3 after 20 steps, and no tolerance that still
tells two runs apart would hide that. With --exact every bit of every statistic counts, and the histograms; two runs
on the same machine with the same seed are expected to be the same even then."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (--help tells more)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments without the program name; by default those of the process.

    Returns:
        The exit status: 0 on success, 1 if ``diff`` finds a difference, 2 after an error, 130 after Ctrl-C, 141 if the
        reader of the output closes the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal lacks must not raise
    chosen = _parser().parse_args(arguments)
    try:
        # Imported here so that --help does not wait for torch.
        status: int = import_module(f"lightning_recorder.commands.{chosen.command}").run(chosen, sys.stdout)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, for example head, has closed the pipe. Redirect stdout, or Python fails again in its final flush.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the status of a program that SIGPIPE has terminated
    except KeyboardInterrupt:
        return 130
    except (RecorderError, OSError) as error:
        sys.stderr.write(f"{_PROGRAM} {chosen.command}: {printable(' '.join(str(error).split()))}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(_PROGRAM, description="What runs have recorded: list it, show it, export it, compare it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_ls(commands)
    _add_show(commands)
    _add_export(commands)
    _add_graph(commands)
    _add_diff(commands)
    return parser


def _add(commands: Any, name: str, description: str, example: str, more: str = "") -> argparse.ArgumentParser:
    epilog = f"example:\n  {_PROGRAM} {example}" + (f"\n\n{more}" if more else "")
    made: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description[0].lower() + description[1:].partition(".")[0],
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def _add_ls(commands: Any) -> None:
    ls = _add(commands, "ls", "List runs, with their recorders, dumps and graphs.", "ls lightning_logs")
    ls.add_argument("path", metavar="PATH", help=_PATH)
    ls.add_argument("--json", action="store_true", help="print JSON")


def _add_show(commands: Any) -> None:
    show = _add(
        commands,
        "show",
        "Show the statistics of a site over the steps.",
        "show lightning_logs/version_0 'encoder.*' --statistic rms",
    )
    show.add_argument("path", metavar="PATH", help=_PATH)
    show.add_argument("site", metavar="SITE", help="a module's name, or a glob: * is one part of a name, ** any number")
    show.add_argument("--recorder", metavar="LABEL", help="of this recorder alone, as activations")
    show.add_argument("--stage", help="of this stage, as validate; by default train")
    show.add_argument("--statistic", action="append", help="this statistic alone; can be given several times")


def _add_export(commands: Any) -> None:
    export = _add(
        commands,
        "export",
        "Write all statistics into one file, a line for each step and site.",
        "export lightning_logs/version_0 statistics.csv",
        "In a .csv file a name that a spreadsheet would take for a formula, as it begins with =, +, - or @, has an\n"
        "apostrophe before it, and what is not seen in a name is escaped. A .parquet file needs pandas and pyarrow.\n"
        "A .pt file holds tensors and lists: torch.load(path, weights_only=True)['runs'][run][recorder].",
    )
    export.add_argument("path", metavar="PATH", help=_PATH)
    export.add_argument("out", metavar="OUT", help="the file; .csv, .parquet or .pt")


def _add_graph(commands: Any) -> None:
    graph = _add(
        commands,
        "graph",
        "Draw the recorded graph again, at another depth or in another format.",
        "graph lightning_logs/version_0 --depth 2 --format png --output model.png",
    )
    graph.add_argument("path", metavar="PATH", help=_PATH)
    graph.add_argument("--depth", type=int, help="down to which depth modules are opened; by default what can be read")
    graph.add_argument("--direction", choices=("TB", "LR", "BT", "RL"), default="TB", help="where the data flows")
    graph.add_argument("--format", help="svg, png, pdf, dot, mermaid or text; by default that of OUTPUT, or svg")
    graph.add_argument(
        "--colour",
        metavar="RECORDER/STATISTIC",
        help="fill the modules with the colours of a statistic, as activations/rms or gradients/zero_fraction",
    )
    graph.add_argument("--step", type=int, help="the step of that statistic; by default the latest")
    graph.add_argument("--output", help="the file; by default graph.<format> here, and the terminal for texts")
    graph.add_argument("--max-nodes", type=int, help="make it smaller until it has no more; without --depth 150")


def _add_diff(commands: Any) -> None:
    diff = _add(
        commands,
        "diff",
        "Compare two runs: where they part first, and how far. The exit status is 0 if they are the same, 1 if not.",
        "diff lightning_logs/version_0 lightning_logs/version_1",
        _TOLERANCE,
    )
    diff.add_argument("one", metavar="RUN_A", help="the log_dir of a run")
    diff.add_argument("other", metavar="RUN_B", help="that of another")
    diff.add_argument("--rtol", type=float, default=1e-3, help="relative tolerance; by default 1e-3")
    diff.add_argument("--atol", type=float, default=1e-7, help="absolute tolerance; by default 1e-7")
    diff.add_argument("--exact", action="store_true", help="every bit counts, histograms too")
    diff.add_argument("--recorder", metavar="LABEL", help="compare this recorder alone")
    diff.add_argument("--stage", help="compare this stage alone")
    diff.add_argument("--json", action="store_true", help="print JSON")
