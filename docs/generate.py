"""Write the pages that are made from the code: python docs/generate.py. A test compares them with the code."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_recorder
from lightning_recorder.commands.main import _parser
from lightning_recorder.insight import RULES, Rule
from lightning_recorder.insight.finding import SEVERITIES

DOCS = Path(__file__).parent

CALLBACKS = {
    "activations": "ActivationRecorder",
    "gradients": "GradientRecorder",
    "parameters": "ParameterRecorder",
    "costs": "CostRecorder",
    "graph": "GraphRecorder",
    "dumper": "TensorDumper",
    "watch": "StepWatch",
    "check": "Check",
}
"""The short name of each callback in the table of arguments."""

STATISTICS = ("activations", "gradients", "parameters")
"""The callbacks that the table lists under one name."""

SETTINGS = """\
# All settings

Every argument with its default. `default_recorders` takes those that choose modules and steps, `outputs`, `compiled`,
`sinks` and `strict`, and [four that record more](which-recorder.md#on-request). Each argument can also be written in
the YAML of a `LightningCLI`. Click a class for the full description.

<!-- The tables are made from the code by docs/generate.py. -->

## Arguments of the callbacks

The column *taken by* uses short names: *activations* is `ActivationRecorder`, *gradients* is `GradientRecorder`,
*parameters* is `ParameterRecorder`, and *statistics* are these three; *costs* is `CostRecorder`, *graph* is
`GraphRecorder`, *dumper* is `TensorDumper`, *watch* is `StepWatch` and *check* is `Check`.

{callbacks}

## Schedule: when to record

Pass `schedule=Schedule(…)`, here with the defaults of `Schedule`. [Choose when to record](how-to/steps.md) has
examples.

{schedule}

## Outputs: files, pictures and limits

Pass `outputs=Outputs(…)`, here with the defaults of `Outputs`.

{outputs}

## Environment variables

| variable | meaning |
|---|---|
| `LIGHTNING_RECORDER` | `on`, `off`, `check`, or a YAML file with recorders: see [any program](how-to/any-program.md) |
| `LIGHTNING_RECORDER_DISK_RESERVE` | The bytes of free disk space that recorders leave; 256 MiB by default |
| `LIGHTNING_RECORDER_FUSED` | `0` computes statistics on a CPU with torch instead of C code |
| `LIGHTNING_RECORDER_TRITON` | `0` computes statistics on a GPU with torch instead of Triton kernels |
"""

RULES_PAGE = """\
# Rules

What `lightning-recorder doctor` looks for. [How findings are made](../explanation/findings.md) explains how the rules
work together.

<!-- The sections are made from the code by docs/generate.py. -->

{rules}
"""

COMMANDS = """\
# Commands

`lightning-recorder` and `python -m lightning_recorder` are the same command. PATH is the `log_dir` of a run, such as
`lightning_logs/version_0`, or a folder above several runs.

| exit status | |
|---|---|
| 0 | success |
| 1 | `check`, `diff`, `doctor` or `scale` found something |
| 2 | an error, such as a wrong argument or a missing file |
| 130 | stopped by Ctrl-C |

<!-- The texts are those of --help, written by docs/generate.py. -->

{commands}
"""


def described(function: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each argument in the section Args of a docstring."""
    text = inspect.getdoc(function) or ""
    (section,) = re.findall(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found = {}
    for name, description in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.MULTILINE | re.DOTALL):
        found[name] = markdown(" ".join(description.split()))
    return found


def markdown(text: str) -> str:
    """Convert the roles and literals of a docstring to the code of Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", r"\|")


def defaults(function: Callable[..., Any]) -> dict[str, str]:
    """Return the default of each argument as code; an argument that must be given has none."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        value = list(default) if isinstance(default, tuple) else default
        found[name] = "none" if default is parameter.empty else f"`{value!r}`".replace("'", '"')
    return found


def table(kind: str) -> str:
    """Return the table of the arguments of one class."""
    function = getattr(lightning_recorder, kind)
    about = described(function)
    rows = [f"| `{name}` | {default} | {about[name]} |" for name, default in defaults(function).items()]
    return "\n".join(["| argument | default | |", "|---|---|---|", *rows])


def callbacks_table() -> str:
    """Return one table of the arguments of all callbacks; one with the same default everywhere is one row."""
    rows: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for short, kind in CALLBACKS.items():
        function = getattr(lightning_recorder, kind)
        about = described(function)
        for name, default in defaults(function).items():
            rows.setdefault((name, default), (about[name], []))[1].append(short)
    order = [name for name, _ in rows]
    lines = [
        f"| `{name}` | {default} | {', '.join(takers).replace(', '.join(STATISTICS), 'statistics')} | {text} |"
        for (name, default), (text, takers) in sorted(rows.items(), key=lambda item: order.index(item[0][0]))
    ]
    return "\n".join(["| argument | default | taken by | |", "|---|---|---|---|", *lines])


def settings_page() -> str:
    """Return the page of all arguments."""
    return SETTINGS.format(callbacks=callbacks_table(), schedule=table("Schedule"), outputs=table("Outputs"))


def commands_page() -> str:
    """Return the page with the help of each command."""
    os.environ["COLUMNS"] = "100"  # argparse wraps at the width of the terminal
    (commands,) = [each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)]
    texts = []
    for name, parser in commands.choices.items():
        texts.append(f"## {name}\n\n```text\n{parser.format_help().rstrip()}\n```")
    return COMMANDS.format(commands="\n\n".join(texts))


def rules_page() -> str:
    """Return the page of all rules, by severity and name."""
    rules = sorted(RULES, key=lambda rule: (SEVERITIES.index(rule.severity), rule.name))
    texts = [
        f"## {rule.name}\n\n"
        f"- **Severity:** {rule.severity}\n"
        f"- **Looks at:** {sentence(rule.statistic)}\n"
        f"- **In healthy runs:** {sentence(rule.usual)}\n"
        f"{limits(rule)}"
        f"- **Usual cause:** {sentence(rule.why)}\n"
        f"- **What to try:** {sentence(rule.next)}\n"
        f"- **Healthy cases that look like it:** {sentence(rule.false_alarms)}"
        for rule in rules
    ]
    return RULES_PAGE.format(rules="\n\n".join(texts))


def limits(rule: Rule) -> str:
    """Return the line with the limits of a rule; nothing if it has none."""
    found = ", ".join(f"`{name}` {value:g}" for name, value in rule.thresholds.items())
    return f"- **Limits:** {found}\n" if found else ""


NAME = r"(?:[A-Za-z]\w*\.)*[A-Za-z_]\w*"
ARGUMENTS = r"\([\w, =.]*\)"
VALUE = r"=(?:'[^']*'|-?\w+(?:\.\w+)*)"
CODE = re.compile(
    rf"(?:[A-Za-z]\w*\.)+[A-Za-z_]\w*{ARGUMENTS}|{NAME}{VALUE}|{NAME}\(\w*\)"
    rf"|(?:[A-Za-z]\w*\.)*\w+_\w*(?:\.\w+)*(?:\(\w*\))?(?:{VALUE})?|\b(?:nn|F|torch)(?:\.\w+)+|\b\w+\[[-:., \w]+\]"
)
"""Code in the text of a rule: a name with an underscore, arguments or a value, or one of torch."""


def sentence(text: str) -> str:
    """Return a text that begins with a capital and ends with a full stop."""
    text = CODE.sub(r"`\g<0>`", text)
    text = "`".join(
        each if place % 2 else each.replace("*", r"\*").replace("<", r"\<")
        for place, each in enumerate(text.split("`"))
    )
    return text[:1].upper() + text[1:].rstrip(".") + "."


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "reference/commands.md": commands_page,
    "reference/rules.md": rules_page,
}


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
