"""The address of the line of code that made a call."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

__all__ = ["SOURCE_LINK", "source_link"]

SOURCE_LINK = "vscode://file/{path}:{line}"
"""Opens a line in VS Code."""


def source_link(source: str, template: str = SOURCE_LINK) -> str:
    """Return the address of a line of code; empty if the line or, for ``{path}``, the file is not known.

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
    # On Windows a path starts with a drive, on other systems with the slash that the template has already.
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
