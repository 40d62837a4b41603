"""The details of a node as text, as a color and as a link to its line of code."""

from __future__ import annotations

import sysconfig
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.renderers.labels import short_count

__all__ = ["SOURCE_LINK", "Detail", "check_details", "check_measured", "describe_detail", "detail_color", "source_link"]

SOURCE_LINK = "vscode://file/{path}:{line}"
"""The address that opens a line in VS Code."""


def source_link(source: str, template: str = SOURCE_LINK) -> str:
    """Return the address of a line of code; empty if the line is unknown, or if ``{path}`` is used for a missing file.

    Args:
        source: The line, such as ``models/net.py:42``, as in :attr:`Node.source`.
        template: The address with ``{path}``, ``{file}`` and ``{line}``; see :class:`GraphvizStyler`.

    Example:
        >>> source_link("models/net.py:42", "https://github.com/me/net/blob/main/{file}#L{line}")
        'https://github.com/me/net/blob/main/models/net.py#L42'
    """
    file, _, line = source.rpartition(":")
    if not file or not line.isdecimal():
        return ""
    path = _absolute(file) if "{path}" in template else ""
    if path is None:
        return ""
    # Remove the leading slash, since the template already has one. On Windows a path starts with a drive instead.
    place = quote(path.lstrip("/"), safe="/:")
    return template.replace("{path}", place).replace("{file}", quote(file, safe="/")).replace("{line}", line)


@lru_cache
def _absolute(file: str) -> str | None:
    """Return the absolute path of a file in the working directory or an installed package, or None."""
    folders = (Path(), *(Path(sysconfig.get_paths()[each]) for each in ("purelib", "platlib")))
    try:
        return next((path.resolve().as_posix() for folder in folders if (path := folder / file).is_file()), None)
    except (OSError, ValueError):
        return None


Detail = Literal["arguments", "inputs", "duration_ms", "flops", "output_bytes", "saved_bytes", "note"]
"""A field of :class:`Node` that labels, tooltips and colors can show."""

_MEASURED = ("duration_ms", "flops", "saved_bytes")
_NUMBERS = (*_MEASURED, "output_bytes")
# The color scale goes from white to a light form of the vermilion of Okabe and Ito, on which black text is readable.
_LIGHT, _DARK = (255, 255, 255), (240, 150, 90)
# Colors by note: grey for frozen or never called, yellow for a missing gradient or registration, vermilion where a
# gradient stops.
_NOTES = {
    "frozen": "#d9d9d9",
    "never called": "#d9d9d9",
    "no gradient": "#f0e442",
    "not registered": "#f0e442",
    "stops": "#f0965a",
}


def check_details(name: str, details: Collection[str]) -> None:
    """Raise ArgumentError for a detail that does not exist."""
    if unknown := [each for each in details if each not in get_args(Detail)]:
        raise ArgumentError(f"{name} must be one of {', '.join(get_args(Detail))}; got {unknown[0]!r}")


def check_measured(detail: str | None, graph: Graph | None = None) -> None:
    """Raise ArgumentError if the detail is a cost, and no graph with measured costs is given."""
    if detail not in _MEASURED:
        return
    # Accept a graph with any measured cost. With costs=True, the times are known, but the numbers of operations may be
    # unknown for all functions.
    if graph is not None and any(getattr(node, each) is not None for node in graph.nodes for each in _MEASURED):
        return
    raise ArgumentError(f"color_by={detail!r} shows costs, which were not measured: record with costs=True")


def describe_detail(node: Node, detail: str) -> str:
    """Return a detail as text with its unit, such as ``1.2 MFLOP`` or ``saves 16 kB``; empty if there is none."""
    if detail == "arguments":
        return ", ".join(f"{name}={value}" if name else value for name, value in node.arguments)
    if detail == "inputs":
        return f"takes {', '.join(map(str, node.inputs))}" if node.inputs else ""
    if detail == "note":
        return node.note
    value = getattr(node, detail)
    # Leave out the size of a node that is a tensor, since the size follows from the shape and dtype, which are shown.
    if not value or (detail == "output_bytes" and node.kind not in ("module", "op")):
        return ""
    if detail == "duration_ms":
        return f"{value:.3g} ms"
    if detail == "flops":
        return _with_unit(value, "FLOP")
    return f"{'saves' if detail == 'saved_bytes' else 'returns'} {_with_unit(value, 'B')}"


def _with_unit(number: int, unit: str) -> str:
    digits, _, prefix = short_count(number).partition(" ")
    return f"{digits} {prefix}{unit}"


def detail_color(node: Node, graph: Graph, detail: str) -> str | None:
    """Return the color for a node's note, or for the ratio of its value to the largest value; None without a value."""
    if detail == "note":
        return next((color for start, color in _NOTES.items() if node.note.startswith(start)), None)
    value = getattr(node, detail) if detail in _NUMBERS else None
    if value is None:
        return None
    share = value / (graph.largest(detail) or 1.0)
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(_LIGHT, _DARK, strict=True))
