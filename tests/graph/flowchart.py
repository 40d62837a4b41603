"""A strict parser for Mermaid flowcharts: every line must have one of the few forms that the renderer writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

__all__ = ["Flowchart", "Item", "read_flowchart"]

# Inside quotes Mermaid ends a label at the next quote, and reads `#35;` as a character and `<br/>` as a line break. The
# remaining characters have no special meaning.
_LABEL = r'"((?:[A-Za-z0-9×·…→✗,]|[ ._-]|#[0-9]+;|<br/>)*)"'
_SHAPES = {"(": ")", "((": "))", "[": "]", "([": "])", "[(": ")]", "[[": "]]", "{{": "}}"}
_NODE = re.compile(rf"n(\d+)([(\[{{]{{1,2}}){_LABEL}([)\]}}]{{1,2}}):::([a-z]+)")
_FRAME = re.compile(rf"subgraph n(\d+)\[{_LABEL}\]")
_MARK = re.compile(r"class n(\d+) ([a-z0-9]+)")
_EDGE = re.compile(rf"n(\d+) -(?:-|\.-)>(?:\|{_LABEL}\|)? n(\d+)")
_CLASS = re.compile(r"classDef ([a-z0-9]+) ((?:[a-z-]+:[#a-z0-9 ]+,?)+)")
_BLANK = "\ufeff"


@dataclass
class Item:
    """A node or a frame, with the enclosing frame and its classes."""

    lines: list[str]
    around: int | None
    shape: str = ""
    classes: list[str] = field(default_factory=list)
    decoded: str = ""


@dataclass
class Flowchart:
    """The contents of a document."""

    title: str
    direction: str
    nodes: dict[int, Item] = field(default_factory=dict)
    frames: dict[int, Item] = field(default_factory=dict)
    edges: list[tuple[int, int, str]] = field(default_factory=list)
    looks: dict[str, dict[str, str]] = field(default_factory=dict)
    line_style: str = ""


def read_flowchart(document: str) -> Flowchart:
    """Parse a document; raise an error for a line of any other form."""
    dashes, titled, config, more_dashes, flow, *lines, last = document.split("\n")
    assert (dashes, more_dashes, last) == ("---", "---", "")
    assert config == "config: {flowchart: {wrappingWidth: 600}}"
    assert titled.isascii()
    chart = Flowchart(json.loads(titled.removeprefix("title: ")), flow.removeprefix("flowchart "))
    around: list[int] = []
    for line in lines:
        _read_line(chart, line.strip(), around)
        assert line == "  " * _indentation(line, around) + line.strip()
    assert around == []
    return chart


def _indentation(line: str, around: list[int]) -> int:
    # The opening and closing lines of a frame have the same indentation as its siblings.
    return len(around) + (0 if line.strip().startswith("subgraph") else 1)


def _read_line(chart: Flowchart, line: str, around: list[int]) -> None:
    frame = around[-1] if around else None
    if found := _NODE.fullmatch(line):
        number, left, label, right, kind = found.groups()
        assert _SHAPES[left] == right
        chart.nodes[int(number)] = Item(_lines(label), frame, left + right, [kind], _decoded(label))
    elif found := _FRAME.fullmatch(line):
        chart.frames[int(found[1])] = Item(_lines(found[2]), frame, decoded=_decoded(found[2]))
        around.append(int(found[1]))
    elif line == "end":
        around.pop()
    elif found := _MARK.fullmatch(line):
        {**chart.nodes, **chart.frames}[int(found[1])].classes.append(found[2])
    elif found := _EDGE.fullmatch(line):
        chart.edges.append((int(found[1]), int(found[3]), "".join(_lines(found[2] or ""))))
    elif found := _CLASS.fullmatch(line):
        chart.looks[found[1]] = dict(part.split(":") for part in found[2].split(","))
    else:
        assert line == "linkStyle default stroke:#7f7f7f", line
        chart.line_style = line


def _decoded(label: str) -> str:
    """Decode a label as Mermaid does."""
    return re.sub(r"#(\d+);", lambda code: chr(int(code[1])), label)


def _lines(label: str) -> list[str]:
    """Return the visible lines of a label, without zero-width blanks."""
    return [_decoded(line).replace(_BLANK, "") for line in label.split("<br/>")]
