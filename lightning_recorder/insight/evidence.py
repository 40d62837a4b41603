"""The evidence that rules examine, and the view of a single site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.functions import function_of
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight.data_facts import DataFacts
from lightning_recorder.insight.finding import Finding, Severity, Trace
from lightning_recorder.insight.module_edges import Wiring
from lightning_recorder.insight.unusual import known_median
from lightning_recorder.names import RUNNING_STATISTICS, Site
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats

__all__ = ["STATISTICS", "Evidence", "View", "gradient_norms", "medians", "spread"]

STATISTICS = (
    "count",
    "mean",
    "std",
    "rms",
    "min",
    "max",
    "zero_fraction",
    "nan_count",
    "inf_count",
    "batch_spread",
    "update_ratio",
    "learning_rate",
    "weight_decay",
    "eval_mode",
)
"""The statistics and settings that the rules read."""

_LONGEST_TRACE = 60
_OF_THE_RULE = cast("Severity", "")


def _none() -> History:
    """Return an empty history."""
    return History(STATISTICS)


@dataclass(frozen=True)
class View:
    """One site in all its records. A view without a record is falsy and has no values.

    Statistics are attributes: ``view.rms`` returns the known values, ``[n]``, in the order of the records.
    """

    evidence: Evidence = field(repr=False, compare=False)  # the evidence that has the site
    table: History = field(repr=False)  # the table of the site
    site: Site

    def __bool__(self) -> bool:
        return self.site in self.table.places

    def __getattr__(self, statistic: str) -> Floats:
        if statistic not in self.table.statistics:
            raise AttributeError(f"{type(self).__name__} has no {statistic!r}")
        return self.column(statistic)[0]

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.site.name

    @property
    def path(self) -> str:
        """The path of the tensor in its module, such as ``out`` or ``weight``."""
        return self.site.path

    @property
    def name(self) -> str:
        """The dotted name of a parameter."""
        return f"{self.site.name}.{self.site.path}" if self.site.name else self.site.path

    @property
    def kind(self) -> str:
        """The class name of the module; an empty string if it is unknown."""
        return self.evidence.type_of(self.site.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the last record; empty if it is unknown."""
        return (self.table.shapes[self.table.places[self.site]] or ()) if self else ()

    @property
    def is_scalar(self) -> bool:
        """True if the tensor has no dimensions, such as a loss."""
        return bool(self) and self.table.shapes[self.table.places[self.site]] == ()

    @property
    def dtype(self) -> str:
        """The dtype, such as ``"float32"``; an empty string if it is unknown."""
        return self.table.dtype(self.site) if self else ""

    @property
    def numel(self) -> int:
        """The number of values; 1 if the shape is unknown."""
        return int(np.prod(self.shape))

    @property
    def is_last(self) -> bool:
        """True if no module follows in the recorded graph, as for a head."""
        return self.evidence.wiring.has_graph and not self.evidence.wiring.outputs.get(self.site.name)

    @cached_property
    def gradient(self) -> View:
        """The gradient of a parameter or of an output."""
        if self.table is self.evidence.parameters:
            return View(self.evidence, self.table, Site(self.site.name, f"{self.site.path}.grad"))
        return View(self.evidence, self.evidence.gradients, self.site)

    @cached_property
    def update(self) -> View:
        """The update of a parameter."""
        return View(self.evidence, self.table, Site(self.site.name, f"{self.site.path}.update"))

    @property
    def inputs(self) -> list[View]:
        """The outputs of the modules that feed this module."""
        return [self.evidence.output(name) for name in self.evidence.wiring.inputs.get(self.site.name, ())]

    def column(self, statistic: str) -> tuple[Floats, NDArray[np.int64]]:
        """Return the known values of a statistic, ``[n]``, and their steps."""
        return self.table.column(self.site, statistic) if self else (np.zeros(0), np.zeros(0, dtype=np.int64))

    def columns(self, *statistics: str) -> tuple[list[Floats], NDArray[np.int64]]:
        """Return several statistics, ``[n]`` each, with their steps. Records that lack one of them are left out."""
        if not self:
            return [np.zeros(0) for _ in statistics], np.zeros(0, dtype=np.int64)
        return self.table.columns(self.site, *statistics)

    def histograms(self) -> list[Histogram]:
        """Return the histograms of the last two records, as far as they exist."""
        return self.table.histograms(self.site) if self else []

    def found(
        self,
        verdict: str,
        statistic: str | None = None,
        *,
        since: int | None = None,
        others: tuple[str, ...] = (),
        parts: Sequence[View] = (),
        **numbers: float,
    ) -> Finding:
        """Make a finding. The rule that yields the finding fills in its own name and the empty texts.

        ``statistic`` is shown over time. ``since`` is the first step that shows the fault, by default the first record.
        ``others`` are further modules with the fault. ``parts`` are the heads or experts with the fault, unless all
        heads or experts of the layer have it.
        """
        steps = [step for step in self.table.steps if since is None or step >= since] or self.table.steps or [0]
        return Finding(
            rule="",
            severity=_OF_THE_RULE,
            module=self.site.name,
            path=self.site.path,
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            records=len(steps),
            verdict=verdict,
            why="",
            next="",
            usual="",
            numbers={name: float(value) for name, value in numbers.items()},
            others=others,
            parts=tuple(int(each.site.path) for each in parts),
            trace=self._trace(statistic) if statistic is not None and self else None,
        )

    def _trace(self, statistic: str) -> Trace:
        """Return a statistic over time, thinned to 60 steps."""
        values, steps = self.column(statistic)
        if len(steps) > _LONGEST_TRACE:
            kept = np.linspace(0, len(steps) - 1, _LONGEST_TRACE).round().astype(int)
            values, steps = values[kept], steps[kept]
        label = self.table.recorders[self.table.places[self.site]]
        return Trace(label, statistic, tuple(steps.tolist()), tuple(values.tolist()), self.site.name)


@dataclass(frozen=True)
class Evidence:
    """Everything that a rule may examine."""

    activations: History  # the outputs in training
    gradients: History  # the gradients of the outputs
    parameters: History  # the parameters, their gradients, updates and optimizer states
    validation: History  # the outputs in validation
    wiring: Wiring  # the modules and their edges
    missing: tuple[tuple[str, str], ...] = ()  # the modules without parameter records, each with the reason
    inputs: History = field(default_factory=_none)  # the inputs of modules in training, if they were recorded
    losses: History = field(default_factory=_none)  # the predictions and targets of losses in training
    # the heads of attention in training, with the statistics of :data:`HEAD_STATISTICS`; see :func:`parts_of`
    heads: History = field(default_factory=_none)
    # the experts of routers in training, with the statistics of :data:`EXPERT_STATISTICS`
    experts: History = field(default_factory=_none)
    data: DataFacts = field(default_factory=DataFacts)  # the samples of the batches
    results: History = field(default_factory=_none)  # all outputs in training, also of functions after the last layer

    def before(self, step: int) -> Evidence:
        """Return the evidence before a step."""
        tables = {
            name: getattr(self, name).before(step)
            for name in ("activations", "gradients", "parameters", "validation", "inputs", "losses", "heads", "experts")
        }
        return replace(self, **tables, results=self.results.before(step))

    def of_model(self) -> Evidence:
        """Return the evidence without the functions after the last layer, such as those of the loss."""
        tables = {
            name: getattr(self, name).without(self.wiring.of_loss)
            for name in ("activations", "gradients", "validation")
        }
        return replace(self, **tables, results=self.activations)

    def view(self, table: History, name: str, path: str = "") -> View:
        """Return the view of a site. Without a path, it is a view of a module; without a name, of the whole model."""
        return View(self, table, Site(name, path))

    def output(self, name: str) -> View:
        """Return the output of a module."""
        return View(self, self.activations, Site(name, "out"))

    def parameter(self, name: str, path: str) -> View:
        """Return a parameter of a module."""
        return View(self, self.parameters, Site(name, path))

    @property
    def outputs(self) -> list[View]:
        """The outputs, in the order of execution."""
        return [View(self, self.activations, site) for site in self.activations.places]

    def inputs_of(self, name: str) -> list[View]:
        """Return the recorded inputs of a module."""
        return [View(self, self.inputs, site) for site in self.inputs.places if site.name == name]

    def type_of(self, name: str) -> str:
        """Return the class name of a module, or of the module class that corresponds to a function.

        The name is an empty string if it is unknown.
        """
        function = None if name in self.wiring.types else function_of(name)
        return self.wiring.types.get(name, "") if function is None else function.type_name

    @property
    def graph(self) -> Graph:
        """The recorded graph; an empty graph if none was recorded."""
        return self.wiring.graph or Graph((), ())

    @cached_property
    def tensors(self) -> list[View]:
        """The parameters, in the order of execution."""
        by_module: dict[str, list[str]] = {}
        for name, path in self.parameters.places:
            # Per-batch gradients are left out: they are also recorded for parameters that are in no optimizer.
            if path not in RUNNING_STATISTICS and not path.endswith(".batch_grad"):
                by_module.setdefault(name, []).append(path)
        # Sites such as "weight.grad" and "weight.exp_avg" belong to the parameter "weight", so they are left out.
        return [
            self.parameter(name, path)
            for name, paths in by_module.items()
            for path in paths
            if not any(path.startswith(f"{other}.") for other in paths)
        ]

    @cached_property
    def weights(self) -> list[View]:
        """The parameters with at least two dimensions."""
        return [each for each in self.tensors if len(each.shape) >= 2]

    @cached_property
    def weights_of(self) -> dict[str, list[View]]:
        """The weights of each module."""
        found: dict[str, list[View]] = {}
        for each in self.weights:
            found.setdefault(each.module, []).append(each)
        return found

    def medians(self, table: History, statistic: str) -> dict[Site, float]:
        """Return the median of a statistic over the steps for each site; NaN if no value is known."""
        return dict(zip(table.places, medians(table.get(statistic)).tolist(), strict=True))


def medians(values: Floats) -> Floats:
    """Return the median of the known values in each column, ``[columns]``; NaN for a column without any."""
    return known_median(values) if len(values) else np.full(values.shape[1], np.nan)


def gradient_norms(table: History) -> dict[Site, float]:
    """Return the median L2 norm of each gradient.

    Unlike the rms, the norm does not depend on the resolution of a feature map.
    """
    norms = table.get("rms") * np.sqrt(table.get("count"))
    middle = medians(np.where(norms > 0, norms, np.nan)).tolist()
    return {site: norm for site, norm in zip(table.places, middle, strict=True) if norm > 0 and site.path == "out"}


def spread(values: Floats) -> float:
    """Return the ratio of the 75th to the 25th percentile of positive values."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high / low) if low > 0 else np.inf
