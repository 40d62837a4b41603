"""Escaping of text for each output format. Every renderer passes all text through these functions."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable

__all__ = ["ascii_text", "dot_attribute", "dot_label", "mermaid_label", "printable", "yaml_string"]


def printable(text: str) -> str:
    """Replace characters that move the cursor, color a terminal or change the writing direction with ``�``."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def dot_label(text: str) -> str:
    """Escape text for an HTML-like label of Graphviz."""
    # Double each backslash: Graphviz would replace \\N in a label by the name of the node.
    return html.escape(printable(text)).replace("\\", "\\\\")


def dot_attribute(text: str) -> str:
    """Escape text for the value of a Graphviz attribute."""
    # Graphviz decodes entities in attributes as well as in labels, and it unescapes backslashes twice.
    return html.escape(printable(text), quote=False).replace("\\", "\\" * 4) or " "


# Mermaid decodes a label before it parses it: as Markdown (some releases of 11), TeX (`$$`), icons (`fa:fa-car`) and
# line breaks (`\n`). It decodes character codes last, having converted them to `ﬂ°°35¶ß` first. So a character that is
# written as a code does not end the label. The zero-width blank after the code keeps the character from forming markup
# with the text that follows.
_BLANK = "#65279;"
_OURS = frozenset("×·…→✗")
_BETWEEN = re.compile(r"(?<=[A-Za-z0-9×·…→✗,])[ ._-](?=[A-Za-z0-9×·…→✗])")


def mermaid_label(lines: Iterable[str]) -> str:
    """Return lines as a quoted Mermaid label.

    Letters, digits, and harmless characters between letters or digits are not encoded.
    """
    return f'"{"<br/>".join(_encoded(printable(line)) for line in lines if line) or _BLANK}"'


def _encoded(line: str) -> str:
    harmless = {match.start() for match in _BETWEEN.finditer(line)}
    return "".join(
        char if index in harmless or (char.isascii() and char.isalnum()) or char in _OURS else _code(char, index)
        for index, char in enumerate(line)
    )


def _code(char: str, index: int) -> str:
    if char.isalpha() and char not in "ﬂß":
        return f"#{ord(char)};"
    return f"{_BLANK if index == 0 else ''}#{ord(char)};{_BLANK}"


def yaml_string(line: str) -> str:
    """Return a line as a JSON string, which YAML accepts. ``<`` is escaped, since it could start an HTML tag."""
    return json.dumps(printable(line)).replace("<", "\\u003c")


def ascii_text(text: str) -> str:
    """Escape non-ASCII characters, because TensorBoard's graph tab does not decode the escapes of its server."""
    return text.encode("ascii", "backslashreplace").decode()
