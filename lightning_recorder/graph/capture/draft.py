"""A node of a graph under construction."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recorder.graph.model import Kind, TensorMeta

__all__ = ["Draft"]


@dataclass(slots=True)
class Draft:
    """A mutable node; see :class:`Node` for its fields.

    A recording creates few objects that Python's garbage collector has to traverse. With ten objects for each function,
    the collections alone took as long as the recording.
    """

    kind: Kind
    name: str
    parent: int | None
    depth: int
    type_name: str = ""
    call: int = 1
    outputs: tuple[TensorMeta, ...] = ()
    parameters: int = 0
    autograd: tuple[str, ...] = ()
    failed: bool = False
    source: str = ""
    duration_ms: float | None = None
