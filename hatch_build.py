"""Make the description on PyPI from the README, whose links and pictures are files of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\((?!https?:|#)([^)]*)\)"


def described(text: str, source: str | None) -> str:
    """Return the README with absolute links; without an address, pictures and links become text.

    Args:
        text: The README.
        source: The address of the repository at GitHub, if it has one.
    """
    if source:
        text = re.sub(rf"(!\[[^\]]*\]){_RELATIVE}", rf"\1({source}/raw/HEAD/\2)", text)
        return re.sub(rf"\]{_RELATIVE}", rf"]({source}/blob/HEAD/\1)", text)
    text = re.sub(rf"^!\[([^\]]*)\]{_RELATIVE}$", r"*\1*", text, flags=re.MULTILINE)
    text = re.sub(rf"\[(!\[[^\]]*\]\([^)]*\))\]{_RELATIVE}", r"\1", text)  # a badge
    return re.sub(rf"\[([^\]]*)\]{_RELATIVE}", r"\1", text)


class Description(MetadataHookInterface):
    """Sets the description of the distributions."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata of the project."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text, source)}
