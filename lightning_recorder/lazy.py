"""Lazy imports: the names in the stub of a package are imported on first use."""

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

    Type checkers read the same stub, so they know the same names. No library is used for this, because it would be the
    only dependency that importing the package needs.

    Args:
        package: The ``__name__`` of the package.
        file: The ``__file__`` of the package. The stub is next to it, and consists of ``from .module import name``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    homes = {each.name: f"{package}.{line.module}" for line in lines for each in line.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"No {package} attribute {name}")
        found = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)  # the next use does not call this function
        return found

    return load, lambda: sorted(homes), sorted(homes)
