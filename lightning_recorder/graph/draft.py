"""A node of a graph that still grows."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recorder.graph.model import Kind, TensorMeta

__all__ = ["Draft"]


@dataclass(slots=True)
class Draft:
    """A node that may still change; see :class:`Node`.

    A recording makes few objects that Python's garbage collector has to go through: with ten for each function the
    collections alone took as long as the recording.
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
