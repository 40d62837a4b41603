"""Draw statistics that are vectors, matrices or images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from lightning_recorder.functions import SCORES
from lightning_recorder.names import site_title
from lightning_recorder.plots import PlotHistory, feature_maps, heat_map
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import evenly
from lightning_recorder.records.table import SiteStatistics
from lightning_recorder.records.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["TensorPictures"]

_Key = tuple[Site, str]
"""A site and the name of a statistic."""

_VALUE = "value"
_JOINED = {
    "attention_entropy_ratio": "head",
    "attention_max_logit": "head",
    "router_load": "expert",
}
"""The statistics with one picture for all layers, and the word for a row of the picture."""
_MOST_CHANNELS = 4096  # longer vectors have no heat map


class TensorPictures:
    """Keeps the statistics that are tensors with several elements over a run, and draws them.

    A vector is drawn as a heat map with a row for each entry, such as a channel, and a column for each step. Matrices
    and images are drawn from the latest record. A tensor with three dimensions is drawn as one panel for each index of
    its first dimension. Empty tensors are not drawn. The heads of all attention layers share one picture for each
    statistic, with a row for each head. The experts of all routers share pictures in the same way.

    At most ``max_images`` pictures are drawn, for evenly spaced sites of the first record that has such statistics.
    """

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        self._chosen: dict[_Key, None] = {}
        self._vectors: dict[_Key, PlotHistory] = {}
        self._latest: dict[_Key, Tensor] = {}
        self._joined: dict[str, PlotHistory] = {}

    def add(self, step: int, sites: Sequence[Site], found: Mapping[Site, SiteStatistics]) -> None:
        """Add a record."""
        if self._max_images:
            self._join(step, sites, found)
        if not self._chosen:
            self._choose(sites, found)
        for site, statistic in self._chosen:
            tensor = found[site].tensors.get(statistic) if site in found else None
            if tensor is None or not tensor.numel():
                continue
            if tensor.dim() > 1:
                self._latest[site, statistic] = tensor
            elif tensor.numel() <= _MOST_CHANNELS:
                history = self._vectors.setdefault(
                    (site, statistic), PlotHistory(statistics=(_VALUE,), max_histograms=0)
                )
                history.add_sites(step, {row: ({_VALUE: value}, None) for row, value in enumerate(tensor.tolist())})

    def _join(self, step: int, sites: Sequence[Site], found: Mapping[Site, SiteStatistics]) -> None:
        rows: dict[str, dict[str, tuple[dict[str, float], None]]] = {}
        for site in sites:
            if site.path == SCORES:
                for statistic, word in _JOINED.items():
                    values = found[site].tensors.get(statistic)
                    for row, value in enumerate([] if values is None else values.tolist()):
                        rows.setdefault(statistic, {})[f"{site.name} {word} {row}"] = {_VALUE: value}, None
        for statistic, found_rows in rows.items():
            history = self._joined.setdefault(statistic, PlotHistory(statistics=(_VALUE,), max_histograms=0))
            history.add_sites(step, found_rows)

    def _choose(self, sites: Sequence[Site], found: Mapping[Site, SiteStatistics]) -> None:
        having = [site for site in sites if found[site].tensors and site.path != SCORES]
        names = dict.fromkeys(name for site in having for name in found[site].tensors)
        rows = max(1, self._max_images // max(1, len(names)))
        chosen = [having[place] for place in evenly(len(having), rows)]
        keys = [(site, name) for site in chosen for name in found[site].tensors]
        self._chosen = dict.fromkeys(keys[: self._max_images])

    def draw(self, group: str, tags: str) -> dict[str, Image]:
        """Return the pictures by tag."""
        images: dict[str, Image] = {}
        for name, joined in self._joined.items():
            word = _JOINED[name]
            rows = [str(row) for row in joined.sites]
            title = f"{group}: {name.partition('_')[2].replace('_', ' ')} of each {word}"
            image = heat_map(joined.steps, rows, joined.table(_VALUE), statistic=name, title=title)
            images[make_tag(f"{tags}_plots", name, "out", f"{word}s")] = image
        for (site, statistic), history in self._vectors.items():
            title, names = _title(group, site, statistic), [str(row) for row in history.sites]
            values = history.table(_VALUE)
            image = heat_map(history.steps, names, values, statistic=statistic, title=title)
            images[_tag(tags, site, statistic)] = image
        for (site, statistic), tensor in self._latest.items():
            maps = tensor if tensor.dim() > 2 else tensor[None]
            values = np.asarray(maps.flatten(0, -4) if maps.dim() > 4 else maps)
            title = _title(group, site, statistic)
            images[_tag(tags, site, statistic)] = feature_maps(values, title=title, label=statistic)
        return images


def _title(group: str, site: Site, statistic: str) -> str:
    return f"{group}: {statistic} of {site_title(*site)}"


def _tag(tags: str, site: Site, statistic: str) -> str:
    return make_tag(f"{tags}_plots", statistic, "out", site_title(*site))
