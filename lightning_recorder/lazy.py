"""Names of a package that are imported on their first use, as its stub lists them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["attach_stub"]


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are in a stub.

    The stub is also what type checkers read, so that both know the same names. A dependency that does this would be
    the only one that a first import needs.

    Args:
        package: The ``__name__`` of the package.
        file: Its ``__file__``. The stub is beside it, and consists of ``from .module import name``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    homes = {each.name: f"{package}.{line.module}" for line in lines for each in line.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"No {package} attribute {name}")
        found = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)  # the next use does not come here
        return found

    return load, lambda: sorted(homes), sorted(homes)
