"""Make the description on PyPI from the README, whose links and pictures are files of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\((?!https?:|#)([^)]*)\)"


_IN_CLONE = re.compile(r"^\$ pip install \. +# in a clone of this repository; ", re.MULTILINE)
_SOURCES = (
    "*Paths in parentheses are files of the source distribution. It has the documentation, its pictures and examples.*"
)


def described(text: str, source: str | None) -> str:
    """Return the README as PyPI shows it, which has none of its files.

    With an address, links and pictures are those of the repository. Without one, each becomes text with its path, and
    the third paragraph says where these files are.

    Args:
        text: The README.
        source: The address of the repository at GitHub, if it has one.
    """
    text = _IN_CLONE.sub("$ pip install lightning-recorder        # ", text)
    if source:
        text = re.sub(rf"(!\[[^\]]*\]){_RELATIVE}", rf"\1({source}/raw/HEAD/\2)", text)
        return re.sub(rf"\]{_RELATIVE}", rf"]({source}/blob/HEAD/\1)", text)
    text = re.sub(rf"^!\[([^\]]*)\]{_RELATIVE}$", r"*\1* (`\2`)", text, flags=re.MULTILINE)
    text = re.sub(rf"\[(!\[[^\]]*\]\([^)]*\))\]{_RELATIVE}", r"\1", text)  # a badge
    text = re.sub(rf"\[([^\]]*)\]{_RELATIVE}", r"\1 (`\2`)", text)
    title, about, rest = text.split("\n\n", 2)
    return f"{title}\n\n{about}\n\n{_SOURCES}\n\n{rest}"


class Description(MetadataHookInterface):
    """Sets the description of the distributions."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata of the project."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, source)}
