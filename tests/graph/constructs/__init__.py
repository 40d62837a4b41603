"""Small nets with their expected graphs, grouped by the construct that each contains."""

from __future__ import annotations

from tests.graph.constructs import data, functions, gradients, memory, modules, opaque  # noqa: F401 - they fill the catalogue
from tests.graph.constructs.catalogue import CONSTRUCTS, Construct, fresh

__all__ = ["CONSTRUCTS", "Construct", "fresh"]
