"""Graphs built by hand, for tests of renderers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_recorder.graph import Edge, Graph, Node, TensorMeta
from lightning_recorder.graph.model import Kind

__all__ = ["HOSTILE", "UNPRINTABLE", "Sketch"]

HOSTILE = [
    '<b>"x"</b>',
    "end",
    "subgraph",
    "a]b",
    "`",
    "`code`",
    "#quot;",
    "#35;",
    "%%{init: {'theme': 'dark'}}%%",
    "%% comment",
    "click n1 callback",
    'x"] --> n1["y',
    'x"]:::op; click n1 "javascript:alert(1)"',
    "javascript:alert(1)",
    "<img src=x onerror=alert(1)>",
    "</svg><script>alert(1)</script>",
    "<br/>",
    "![a](http://x.y/z.png)",
    "[a](javascript:alert(1))",
    "http://x.y",
    "back\\slash",
    "\\n",
    "\\\\",
    "end\\",
    "__init__",
    "_a_",
    "*b*",
    "**b**",
    "~~s~~",
    "1. x",
    "1) x",
    "- x",
    "> q",
    "# head",
    "    code",
    "| a | b |",
    "---",
    "===",
    "$$x^2$$",
    "fa:fa-car",
    "style x:#a;",
    "classDef x:#f;",
    "n1 --> n2",
    "{a|b}",
    "{{x}}",
    "@{ shape: x }",
    "&amp; &#60;",
    "ﬂ°°60¶ß",
    "quo'te\"s",
    "a/b",
    "a:0",
    "^x",
    "node {",
    "}",
    "(x)",
    "x  y",
    "input_ids",
    "h.0",
    "héllo wörld",
    "名前",
    "🔥",
]
"""Names with a meaning in some format, and names that are only unusual."""

UNPRINTABLE = ["new\nline", "tab\tbed", "carriage\rreturn", "nul\0", "bell\a", "\x1b[31mred", "\u202egpj", "\ud800"]


class Sketch:
    """Builds a graph from nodes in the order of time.

    Args:
        type_name: The model's class.
        about: Further fields of the graph.
    """

    def __init__(self, type_name: str = "Net", **about: Any) -> None:
        self.nodes = [Node(0, "module", "", None, 0, type_name=type_name)]
        self.edges: list[Edge] = []
        self.about = about

    def add(
        self,
        kind: Kind,
        name: str,
        *sources: int | tuple[int, int],
        inside: int = 0,
        shapes: Sequence[tuple[int, ...]] = ((2, 4),),
        **about: Any,
    ) -> int:
        """Add a node with an edge from each source (a pair gives the number of tensors), and return its id."""
        number = len(self.nodes)
        around = next(node for node in self.nodes if node.id == inside)
        outputs = tuple(TensorMeta(shape, "float32") for shape in shapes)
        self.nodes.append(Node(number, kind, name, inside, around.depth + 1, outputs=outputs, **about))
        for source in sources:
            start, times = source if isinstance(source, tuple) else (source, 1)
            self.edges.append(Edge(start, number, times))
        return number

    def call(self, name: str, type_name: str, *sources: int | tuple[int, int], **about: Any) -> int:
        """Add a call of a module."""
        return self.add("module", name, *sources, type_name=type_name, **about)

    def graph(self) -> Graph:
        """Return the graph of all added nodes."""
        return Graph(tuple(self.nodes), tuple(self.edges), **self.about)
