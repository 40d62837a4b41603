"""Attention heads and experts of routers, called parts, as sites that rules can view."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.names import Site
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Table, make_schema

__all__ = ["add_parts", "family_of", "layers_of", "listed", "new_parts"]


def new_parts(statistics: Sequence[str]) -> History:
    """Return an empty history for parts with these statistics."""
    return History((*statistics, "nan_count", "inf_count"))  # a history keeps the first non-finite values


def add_parts(history: History, table: Table) -> None:
    """Add the vectors of a record to a history. Each entry of a vector becomes a site whose path is its index."""
    names = history.statistics[:-2]
    blocks: dict[Site, NDArray[np.float64]] = {}
    for site in table.sites:
        vectors = table.tensors.get(site, {})
        if names[0] not in vectors:
            continue
        # Records of an earlier version lack some of the vectors. Vectors in a damaged file may have other lengths.
        unknown = np.full(np.shape(vectors[names[0]]), np.nan)
        columns = [np.asarray(vectors.get(name, unknown)) for name in names]
        if len({each.shape for each in columns}) == 1:
            blocks[site] = np.stack(columns, axis=1)
    if not blocks:
        return
    sites = tuple(Site(site.name, str(row)) for site, block in blocks.items() for row in range(len(block)))
    nothing = (None,) * len(sites)
    schema = make_schema(sites, names, nothing, nothing)
    history.add(Table(schema, np.concatenate([*blocks.values()]), about=table.about))


def layers_of(evidence: Evidence, history: History) -> Mapping[str, list[View]]:
    """Return the views of all parts of each layer."""
    found: dict[str, list[View]] = {}
    for site in history.places:
        found.setdefault(site.name, []).append(View(evidence, history, site))
    return found


def family_of(name: str) -> str:
    """Return a layer name with ``*`` in place of its numbers; equal layers of a stack have the same result.

    Example:
        >>> family_of("encoder.layers.3.attn.softmax")
        'encoder.layers.*.attn.softmax'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def listed(word: str, views: Sequence[View]) -> str:
    """Return the numbers of heads or experts in words.

    Example:
        >>> views = [View(None, History(()), Site("attn", number)) for number in "2579"]
        >>> listed("head", views[:1]), listed("head", views)
        ('head 2', 'heads 2, 5, 7 and 1 more')
    """
    numbers = [each.path for each in views]
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    shown = ", ".join(numbers[:3])
    more = len(numbers) - 3
    return f"{word}s {shown} and {more} more" if more > 0 else f"{word}s {', '.join(numbers[:-1])} and {numbers[-1]}"
