"""Entry point of the command line: arguments, help, errors and the exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from typing_extensions import override

from lightning_recorder.commands.terminal import printable
from lightning_recorder.errors import RecorderError

__all__ = ["main"]

_PROGRAM = "lightning-recorder"
_LONGEST_ERROR = 4000  # the most characters of an error; some errors list all rules
_PATH = "the log_dir of a run, its recorder folder, or a parent folder of several runs"
_TOLERANCE = """\
Two numbers are equal if their difference is at most ATOL + RTOL * reference. The reference of mean, std, rms, min,
max and quantiles is the larger rms of the site, so that a mean near zero is no difference. The reference of fractions
is 1, and that of all other statistics is the larger of the two numbers. Counts must be equal. A site whose rms is
below ATOL in both runs counts as zero, such as the gradient of a bias before a BatchNorm, which is only rounding.

With the defaults, the first steps of a run equal those of the same run with another number of threads. In a small
convolutional network, the statistics of these runs differed by 1e-6 to 3e-4 in the first five steps and by 3e-6 after
80 steps of SGD. Differences grow with training: with Adam some exceeded 1e-3 after 20 steps, and a tolerance that
hides them would also hide the difference between two runs. With --exact, all statistics and histograms must be equal
to the bit, as expected of two runs on the same machine with the same seed."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments without the program name; by default those of the process.

    Returns:
        The exit status: 0 on success, 1 if ``diff``, ``doctor`` or ``scale`` finds something, 2 after an error, 130
        after Ctrl-C, 141 if the reader of the output closes the pipe. ``run`` and ``check`` do not return: the program
        replaces the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # unsupported characters of a terminal must not raise
    chosen = _parser().parse_args(arguments)
    try:
        # Import here so that --help does not wait for torch.
        status: int = import_module(f"lightning_recorder.commands.{chosen.command}").run(chosen, sys.stdout)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Redirect stdout; otherwise, Python fails again in its final
        # flush.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the status of a program that SIGPIPE terminated
    except KeyboardInterrupt:
        return 130
    except (RecorderError, OSError) as error:
        sys.stderr.write(f"{_PROGRAM} {chosen.command}: {printable(' '.join(str(error).split()), _LONGEST_ERROR)}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        _PROGRAM,
        description="Record a program, and list, show, examine, export, draw and compare the recordings of runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_run(commands)
    _add_check(commands)
    _add_ls(commands)
    _add_show(commands)
    _add_doctor(commands)
    _add_view(commands)
    _add_report(commands)
    _add_export(commands)
    _add_graph(commands)
    _add_diff(commands)
    _add_scale(commands)
    _add_precision(commands)
    _add_submit(commands)
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


def _add_check(commands: Any) -> None:
    check = _add(
        commands,
        "check",
        "Check the first training step of a Python program, and end the program before it trains.",
        "check train.py --batch-size 64",
        "The program runs until its first fit has its first batch. The step is then repeated on copies to answer the\n"
        "questions of docs/how-to/check.md. The exit status is 1 if an answer is wrong, 2 if there is no answer,\n"
        "and 0 otherwise. With LIGHTNING_RECORDER=check, the program trains after the check, with every bit\n"
        "as without it.",
    )
    check.usage = f"{_PROGRAM} check [-h] [-m] PROGRAM ARGS"  # argparse shows only dots for a remainder
    check.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    check.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGS", help="the program and its arguments"
    )


def _add_run(commands: Any) -> None:
    run = _add(
        commands,
        "run",
        "Run a Python program and record its trainers, without a change to it.",
        "run --config recorder.yaml train.py --epochs 3",
        "It is the same as LIGHTNING_RECORDER=on python PROGRAM ARGS, or with --config, LIGHTNING_RECORDER=FILE.\n"
        "The exit status is that of the program.",
    )
    run.usage = f"{_PROGRAM} run [-h] [--config FILE] [-m] PROGRAM ARGS"  # argparse shows only dots for a remainder
    run.add_argument("--config", metavar="FILE", help="a YAML file with the recorders; by default the default set")
    run.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGS", help="the program and its arguments")


def _add_ls(commands: Any) -> None:
    ls = _add(commands, "ls", "List the runs with their recorders, dumps and graphs.", "ls lightning_logs")
    ls.add_argument("path", metavar="PATH", nargs="?", default=".", help=f"{_PATH}; by default the current folder")
    ls.add_argument("--json", action="store_true", help="print JSON")


def _add_show(commands: Any) -> None:
    show = _add(
        commands,
        "show",
        "Show a line for each site with its last, smallest and largest value and its course, the most unusual first.",
        "show lightning_logs/version_0 'encoder.*' head --statistic rms",
        "which sites:\n"
        f"  {_PROGRAM} show lightning_logs/version_0 --where 'nan_count>0'\n\n"
        "With --where, the matching sites are listed with the steps at which the condition holds. Several conditions\n"
        "must hold in the same record.",
    )
    show.add_argument("path", metavar="PATH", help=_PATH)
    show.add_argument(
        "site",
        metavar="SITE",
        nargs="*",
        default=[],  # otherwise argparse shows the argument as required
        help="the name of a module, or a glob: * for one part of a name, ** for any number; several are possible",
    )
    show.add_argument("--recorder", metavar="LABEL", help="show only this recorder, for example activations")
    show.add_argument("--stage", help="show this stage, for example validate; by default train")
    show.add_argument("--statistic", action="append", help="show this statistic, by default rms; may be repeated")
    show.add_argument("--all", action="store_true", help="list all sites, not only as many as a screen shows")
    show.add_argument(
        "--details", action="store_true", help="print all statistics of each site, with a line for each step"
    )
    show.add_argument(
        "--where",
        metavar="CONDITION",
        action="append",
        help="list the sites that meet a condition, for example 'nan_count>0' or 'rms>=100'; may be repeated",
    )
    show.add_argument(
        "--json",
        action="store_true",
        help="print JSON: the values of each site at each step, all statistics by default",
    )


def _add_doctor(commands: Any) -> None:
    doctor = _add(
        commands,
        "doctor",
        "Say what is wrong in a run: findings from its records, causes first. The exit status is 0 if there "
        "are none and 1 if there are findings.",
        "doctor lightning_logs/version_0",
        "Each finding has its rule, the numbers, the values in healthy runs, the usual cause and what to try. Notes\n"
        "describe what is usually intended, such as frozen layers; a run with notes only is healthy. If\n"
        "too little was recorded to call a run healthy, it says why; --all names the rules that could not run.",
    )
    doctor.add_argument("path", metavar="PATH", help=_PATH)
    doctor.add_argument("--all", action="store_true", help="print all findings in full, not only the first")
    doctor.add_argument(
        "--ignore", metavar="RULE", action="append", default=[], help="leave out a rule, for example always-clipped"
    )
    form = doctor.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=("text", "json", "sarif", "junit"),
        default="text",
        help="print JSON, SARIF for code scanning, or the XML of JUnit for the test reports of a CI; by default text",
    )
    form.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")


def _add_view(commands: Any) -> None:
    view = _add(
        commands,
        "view",
        "Show findings, graph and the history of every layer in a browser. Two runs are laid over each other.",
        "view lightning_logs/version_0 --output page.html",
        "Without --output the page is served on this machine and follows the run while it goes on. With --output it\n"
        "is one file that needs no network; it can be opened by double click.",
    )
    view.add_argument("paths", metavar="PATH", nargs="+", help=_PATH)
    view.add_argument("--output", metavar="FILE", help="write the page to a file instead of serving it")
    view.add_argument(
        "--limit",
        metavar="MB",
        type=int,
        default=10,
        help="the size of all statistics in the page; beyond it, neighboring records are joined so that extremes are "
        "kept, and the served page loads the rest of a layer when it is opened (default 10)",
    )
    view.add_argument("--port", type=int, default=0, help="the port of the server; by default any that is free")
    view.add_argument("--no-browser", action="store_true", help="print the address and open no browser")


def _add_report(commands: Any) -> None:
    report = _add(
        commands,
        "report",
        "Write a report of a run for a review: verdict, graph, five charts and settings.",
        "report lightning_logs/version_0 --output report.html",
        "A .md file is Markdown with its pictures beside it. A .html file is complete, and a browser prints it as PDF.",
    )
    report.add_argument("path", metavar="PATH", help=_PATH)
    report.add_argument(
        "--output", metavar="FILE", default="report.md", help="the file, .md or .html; by default report.md"
    )


def _add_export(commands: Any) -> None:
    export = _add(
        commands,
        "export",
        "Write all statistics to one file, with one row per step and site.",
        "export lightning_logs/version_0 statistics.csv",
        "In a .csv file, a name that begins with =, +, - or @ gets an apostrophe, so that no spreadsheet runs it as a\n"
        "formula, and invisible characters are escaped. A .parquet file needs pandas and pyarrow. A .pt file contains\n"
        "tensors and lists: torch.load(path, weights_only=True)['runs'][run][recorder].",
    )
    export.add_argument("path", metavar="PATH", help=_PATH)
    export.add_argument("out", metavar="OUT", help="the file to write, .csv, .parquet or .pt")


def _add_graph(commands: Any) -> None:
    graph = _add(
        commands,
        "graph",
        "Draw the recorded graph at another depth or in another format.",
        "graph lightning_logs/version_0 --depth 2 --format png --output model.png",
    )
    graph.add_argument("path", metavar="PATH", help=_PATH)
    graph.add_argument(
        "--depth", type=int, help="the deepest level of open modules; by default the deepest that is readable"
    )
    graph.add_argument(
        "--direction",
        choices=("TB", "LR", "BT", "RL"),
        default="TB",
        help="the direction of the data flow",
    )
    form = graph.add_mutually_exclusive_group()
    form.add_argument(
        "--format", help="svg, png, pdf, dot, mermaid, text or json; by default the suffix of OUTPUT, or svg"
    )
    form.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="the same as --format json: the whole graph, or with --depth or --max-nodes the view that is drawn",
    )
    graph.add_argument(
        "--color",
        "--colour",
        metavar="RECORDER/STATISTIC",
        help="color the modules by a statistic, for example activations/rms or gradients/zero_fraction",
    )
    graph.add_argument("--step", type=int, help="the step of the statistic; by default the latest")
    graph.add_argument("--output", help="the file; by default ./graph.<format>, or the terminal for a text format")
    graph.add_argument(
        "--max-nodes",
        type=int,
        help="the largest number of nodes; by default 150, or no limit with --depth",
    )


def _add_diff(commands: Any) -> None:
    diff = _add(
        commands,
        "diff",
        "Say why runs differ, and at which step and site they differ first. The exit status is 0 if they are equal, "
        "1 if they differ or have nothing in common, and 2 after an error.",
        "diff lightning_logs/version_0 lightning_logs/version_1",
        _TOLERANCE,
    )
    diff.add_argument("runs", metavar="RUN", nargs="+", help="the log_dir of a run; the first is the reference")
    diff.add_argument(
        "--map",
        metavar="A=B",
        action="append",
        default=[],
        help="map module names of the first run to those of the others, such as 'model.layers.*=blocks.*'; * stands "
        "for any text; may be repeated",
    )
    diff.add_argument(
        "--noise",
        metavar="RUN",
        nargs="+",
        default=[],
        help="further runs of the configuration of the first run, such as other seeds; differences within their "
        "spread do not count",
    )
    diff.add_argument("--ranks", action="store_true", help="compare the ranks of one run with each other")
    diff.add_argument("--all", action="store_true", help="print all sites that differ")
    diff.add_argument("--rtol", type=float, default=1e-3, help="relative tolerance; by default 1e-3")
    diff.add_argument("--atol", type=float, default=1e-7, help="absolute tolerance; by default 1e-7")
    diff.add_argument("--exact", action="store_true", help="compare bit by bit, including histograms")
    diff.add_argument("--recorder", metavar="LABEL", help="compare only this recorder")
    diff.add_argument("--stage", help="compare only this stage")
    diff.add_argument("--json", action="store_true", help="print JSON")


def _add_scale(commands: Any) -> None:
    scale = _add(
        commands,
        "scale",
        "Check that the values of each site do not depend on the width of the model. The exit status is 0 if they do "
        "not, 1 if they do, and 2 after an error.",
        "scale runs/width_64 runs/width_128 runs/width_256",
        "This is the coordinate check of maximal-update parametrization (Yang et al. 2022, arXiv:2203.03466): record\n"
        "the first steps of the same training at several widths, with ActivationRecorder(every_n_train_steps=1).\n"
        "The exponent of the mean absolute value is 0 at every site and step if the parametrization is right. The\n"
        "output of the model may shrink as the root of the width at first. An exponent is off if it is further away\n"
        "than the tolerance and three standard errors; more widths and seeds make the errors smaller.",
    )
    scale.add_argument("runs", metavar="RUN", nargs="+", help=_PATH)
    scale.add_argument(
        "--widths", metavar="N", type=float, nargs="+", default=[], help="the width of each run; by default from shapes"
    )
    scale.add_argument(
        "--recorder", metavar="LABEL", default="activations", help="the recorder; by default activations"
    )
    scale.add_argument("--tolerance", type=float, default=0.15, help="the largest exponent that counts as 0; 0.15")
    scale.add_argument("--all", action="store_true", help="print all sites")
    scale.add_argument("--json", action="store_true", help="print JSON")


def _add_precision(commands: Any) -> None:
    precision = _add(
        commands,
        "precision",
        "Rank weights, activations and gradients by the error that a narrow number format would make.",
        "precision checkpoints/last.ckpt --format nvfp4",
        "Each tensor gets its signal-to-noise ratio in dB in each format, and the shares of its values that are\n"
        "clipped and that become zero. 20 dB is an error of 10 % of the rms, and 14 dB of 20 %. The order\n"
        "is that of the ratio of the tensor or of the median of its channels, whichever is lower. Channels and tokens\n"
        "far above the rest are listed. Tensors of a run are those of its latest dump of TensorDumper.",
    )
    precision.add_argument(
        "path",
        metavar="PATH",
        help="a checkpoint (.ckpt, .pt, .safetensors), a dump of tensors, or the log_dir of a run",
    )
    precision.add_argument(
        "--format",
        choices=("int8", "int8-channel", "int4-32", "int4-128", "e4m3", "e5m2", "mxfp8", "nvfp4"),
        default="e4m3",
        help="the format that decides the order; by default e4m3, which is float8 with one scale per tensor",
    )
    precision.add_argument(
        "--below",
        metavar="DB",
        type=float,
        help="the ratio below which a tensor should stay in bfloat16; by default 20, and 14 for four bits",
    )
    precision.add_argument("--all", action="store_true", help="print all tensors")
    precision.add_argument("--json", action="store_true", help="print JSON")


def _add_submit(commands: Any) -> None:
    submit = _add(
        commands,
        "submit",
        "Write a run to a small file that can be attached to a report, without data, weights and secrets.",
        "submit lightning_logs/version_0",
        "The file has the records, the graph and the findings: statistics, names and classes of modules, shapes, and\n"
        "settings that are numbers. It has no tensors, no texts from hyperparameters, no folders and addresses. After\n"
        "unpacking, doctor, show and view read it. Look into it before you send it.",
    )
    submit.add_argument("path", metavar="PATH", help="the log_dir of a run")
    submit.add_argument("--output", metavar="FILE", help="the file, .zip; by default ./<name of the log_dir>.zip")
