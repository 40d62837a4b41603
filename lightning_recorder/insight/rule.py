"""Rules as data, and the evidence that they examine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_recorder.functions import function_of
from lightning_recorder.insight.finding import Finding, Severity, Trace
from lightning_recorder.insight.odd_blocks import OddBlock
from lightning_recorder.insight.table import Floats, Table
from lightning_recorder.insight.unusual import known_median
from lightning_recorder.insight.wiring import Wiring
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.taps import Site

__all__ = ["Evidence", "Parameter", "Rule", "medians", "spread"]

_LONGEST_TRACE = 60


@dataclass(frozen=True)
class Rule:
    """A rule: a statistic, its threshold, and what it means.

    Args:
        name: The name of the rule.
        severity: The severity of its findings.
        statistic: The statistic, in words.
        thresholds: The thresholds by name.
        persistence: The number of last records that must show it; 0 if a single record is enough.
        usual: The values in healthy runs.
        why: The usual cause.
        next: What to look at and what to try.
        false_alarms: Healthy cases that can look like it, and how the rule avoids them.
        examine: A function that yields the findings.
        explains: Rules whose findings are consequences, each with the place of those modules relative to this one:
            ``"same"``, ``"upstream"``, ``"downstream"`` or ``"any"``.
        is_lasting: True if what it finds does not pass while a model trains, so that it is logged when first found.
    """

    name: str
    severity: Severity
    statistic: str
    thresholds: Mapping[str, float]
    persistence: int
    usual: str
    why: str
    next: str
    false_alarms: str
    examine: Callable[[Rule, Evidence], Iterable[Finding]]
    explains: Mapping[str, Collection[str]] = field(default_factory=dict)
    is_lasting: bool = False

    def found(
        self,
        evidence: Evidence,
        table: Table,
        site: Site,
        verdict: str,
        *,
        statistic: str | None = None,
        since: int | None = None,
        **numbers: float,
    ) -> Finding:
        """Make a finding about a site.

        Args:
            evidence: The evidence, for the number of records.
            table: The table of the site.
            site: The site; its path may be empty.
            verdict: What is wrong.
            statistic: The statistic to show over time.
            since: The first step that shows it; by default the first record.
            numbers: The compared values.
        """
        steps = [step for step in table.steps if since is None or step >= since] or table.steps or [0]
        return Finding(
            rule=self.name,
            severity=self.severity,
            module=site.name,
            path=site.path,
            first_step=int(steps[0]),
            last_step=int(steps[-1]),
            records=len(steps),
            verdict=verdict,
            why=self.why,
            next=self.next,
            usual=self.usual,
            numbers={name: float(value) for name, value in numbers.items()},
            trace=None if statistic is None or site not in table.places else trace(table, site, statistic),
        )


def trace(table: Table, site: Site, statistic: str) -> Trace:
    """Return a statistic of a site over time, thinned to 60 steps."""
    values, steps = table.column(site, statistic)
    if len(steps) > _LONGEST_TRACE:
        kept = np.linspace(0, len(steps) - 1, _LONGEST_TRACE).round().astype(int)
        values, steps = values[kept], steps[kept]
    label = table.recorders[table.places[site]]
    return Trace(label, statistic, tuple(steps.tolist()), tuple(values.tolist()), site.name)


@dataclass(frozen=True)
class Parameter:
    """The sites of one parameter.

    Args:
        site: The site of its values.
        gradient: The site of its gradient, if it ever had one.
        update: The site of its updates.
    """

    site: Site
    gradient: Site | None
    update: Site | None

    @property
    def name(self) -> str:
        """The dotted name of the parameter."""
        return f"{self.site.name}.{self.site.path}" if self.site.name else self.site.path


@dataclass(frozen=True)
class Evidence:
    """Everything that a rule may examine.

    Args:
        activations: The outputs in training.
        gradients: The gradients of the outputs.
        parameters: The parameters, their gradients, updates and optimizer states.
        validation: The outputs in validation.
        wiring: The modules and their edges.
        coverage: The contents of the receipt: the missing modules of each recorder with the reasons.
        inputs: The inputs of modules in training, if they were recorded.
        losses: The predictions and targets of losses in training.
        odd_blocks: The blocks that compute something else than all others of their list.
    """

    activations: Table
    gradients: Table
    parameters: Table
    validation: Table
    wiring: Wiring
    coverage: Mapping[str, Any] = field(default_factory=dict)
    inputs: Table = field(default_factory=Table)
    losses: Table = field(default_factory=Table)
    odd_blocks: tuple[OddBlock, ...] = ()

    def before(self, step: int) -> Evidence:
        """Return the evidence before a step."""
        tables = {
            name: getattr(self, name).before(step)
            for name in ("activations", "gradients", "parameters", "validation", "inputs", "losses")
        }
        return replace(self, **tables)

    def of_model(self) -> Evidence:
        """Return the evidence without the functions behind the layers, such as those of the loss."""
        tables = {
            name: getattr(self, name).without(self.wiring.of_loss)
            for name in ("activations", "gradients", "validation")
        }
        return replace(self, **tables)

    def inputs_of(self, name: str) -> list[Site]:
        """Return the recorded inputs of a module."""
        return [site for site in self.inputs.places if site.name == name]

    def type_of(self, name: str) -> str:
        """Return the class name of a module, or that of the module that computes the same as a function.

        It is an empty string if it is unknown.
        """
        function = None if name in self.wiring.types else function_of(name)
        return self.wiring.types.get(name, "") if function is None else function.type_name

    @cached_property
    def tensors(self) -> list[Parameter]:
        """The parameters, in the order of execution."""
        sites = self.parameters.places
        by_module: dict[str, list[str]] = {}
        for name, path in sites:
            if path not in RUNNING_STATISTICS:
                by_module.setdefault(name, []).append(path)
        found = []
        for name, paths in by_module.items():
            # The sites "weight.grad" and "weight.exp_avg" belong to "weight".
            for path in paths:
                if not any(path.startswith(f"{other}.") for other in paths):
                    parts = (Site(name, f"{path}.{part}") for part in ("grad", "update"))
                    gradient, update = (site if site in sites else None for site in parts)
                    found.append(Parameter(Site(name, path), gradient, update))
        return found

    @cached_property
    def weights(self) -> list[Parameter]:
        """The parameters with at least two dimensions."""
        return [each for each in self.tensors if len(self.shape(each)) >= 2]

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of a parameter; empty if it is unknown."""
        return self.parameters.shapes[self.parameters.places[parameter.site]] or ()

    def column(self, site: Site | None, statistic: str) -> Floats:
        """Return the known values of a site of a parameter; none if there is no such site."""
        return np.zeros(0) if site is None else self.parameters.column(site, statistic)[0]

    def setting(self, parameter: Parameter, name: str) -> Floats:
        """Return ``"learning_rate"`` or ``"weight_decay"`` of a parameter in each record, where known."""
        return self.parameters.column(parameter.site, name)[0]

    def medians(self, table: Table, statistic: str) -> dict[Site, float]:
        """Return the median over the steps of each site; NaN if it is never known."""
        return dict(zip(table.places, medians(table.get(statistic)).tolist(), strict=True))

    def missing(self, group: str) -> Iterator[tuple[str, str]]:
        """Yield the modules without a record in the recorders of a group, with the reason."""
        for label, receipt in self.coverage.items():
            modules = receipt.get("modules") if isinstance(receipt, Mapping) else None
            if label.partition("-")[0] == group and isinstance(modules, Mapping):
                for name, about in modules.items():
                    if isinstance(about, Mapping) and not about.get("fired", True):
                        yield str(name), str(about.get("why", ""))


def medians(values: Floats) -> Floats:
    """Return the median of the known values in each column, ``[columns]``; NaN if there are none."""
    return known_median(values) if len(values) else np.full(values.shape[1], np.nan)


def spread(values: Floats) -> float:
    """Return the ratio of the 75th to the 25th percentile of positive values."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high / low) if low > 0 else np.inf
