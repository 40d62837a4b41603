"""Comparison of two runs: the step and the site at which they diverge first, and all other differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_recorder.errors import ArgumentError, check_number
from lightning_recorder.graph.model import Graph
from lightning_recorder.names import Site, site_title
from lightning_recorder.recordings.bands import noise_bands, rounding_sites
from lightning_recorder.recordings.call_order import CallOrder
from lightning_recorder.recordings.divergence import SETTINGS, Divergence, SeriesPair, SiteDivergence, Tolerance
from lightning_recorder.recordings.name_map import NameMap, suggest_rules
from lightning_recorder.recordings.recording import Run
from lightning_recorder.recordings.run_changes import Change, distinct, graph_changes, series_changes, setting_changes
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.file import LOGGED

__all__ = ["Comparison", "Difference", "compare"]

# Statistics at the site of a parameter that describe the step rather than the value.
_OF_THE_STEP = ("update_ratio", "learning_rate", "weight_decay", "eval_mode")
_UNTOUCHED = Tolerance(rtol=1e-9, atol=0.0)  # absorbs rounding when the same values are reduced in another order
_GROUPS = ("activations", "gradients", "parameters")  # in the order in which a step produces them


@dataclass(frozen=True)
class Difference:
    """A difference that is not numerical.

    Args:
        kind: ``"recorder"``, ``"stage"``, ``"step"``, ``"site"`` or ``"statistic"`` for something that only one run
            has; ``"dtype"`` or ``"shape"`` for a site that differs in its dtype or shape.
        recorder: The label of the recorder.
        what: The recorder, stage, step, site or statistic in question. For a dtype or shape, the name and path of the
            site.
        one: The value in the first run.
        other: The value in the second run.
    """

    kind: str
    recorder: str
    what: str
    one: str
    other: str


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of comparing two runs.

    Args:
        first: The first divergence: the site that is executed first in the earliest step that differs. ``None`` if the
            runs agree within the tolerance.
        last_same: The last step before ``first`` that both runs have recorded.
        sites: The sites that diverge, sorted by descending distance.
        differences: The differences that are not numerical.
        steps: The number of steps that both runs have recorded.
        compared: The number of records of single sites that were compared.
        first_bits: The first difference of any bit, whatever the tolerance; ``None`` if every statistic agrees to the
            bit.
        changes: The differences of the models and of the settings, which may explain why the runs differ.
        rounding: The sites that are left out because their values are only rounding noise.
        rules: The rules of the name map; if none were given, the rules found from the structure.
        pairs: The compared series, in the order of execution.
        classes: The classes of the first run's modules, as far as its graph contains them.
        notes: Possible causes that are not differences themselves: versions, number of ranks, damaged lines.
        bad: For each run, the origin of its first non-finite value according to its findings; ``None`` if it is
            unknown, or if the first divergence has only finite values.
    """

    first: Divergence | None = None
    last_same: int | None = None
    sites: list[SiteDivergence] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    steps: int = 0
    compared: int = 0
    first_bits: Divergence | None = None
    changes: list[Change] = field(default_factory=list)
    rounding: list[Site] = field(default_factory=list)
    rules: tuple[str, ...] = ()
    pairs: list[SeriesPair] = field(default_factory=list, compare=False)
    classes: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: list[str] = field(default_factory=list)
    bad: tuple[str | None, str | None] = (None, None)

    def __repr__(self) -> str:
        """Return a short text, since the fields may have a line for each site."""
        about = "the same" if self.same else f"{len(self.differences)} differences, {len(self.sites)} sites diverge"
        first = "" if self.first is None else f", first {site_title(*self.first.site)} at step {self.first.step}"
        return f"<comparison of {self.compared} records in {self.steps} steps: {about}{first}>"

    @property
    def same(self) -> bool:
        """True if something was compared and nothing differs beyond the tolerance."""
        return self.first is None and not self.differences and self.compared > 0


def compare(
    one: Run,
    other: Run,
    tolerance: Tolerance | None = None,
    *,
    recorder: str | None = None,
    stage: str | None = None,
    names: Iterable[str] = (),
    noise: Sequence[Run] = (),
) -> Comparison:
    """Compare two runs step by step, in the order of execution.

    Within a step, training comes before evaluation. The values of parameters exist before the step, so they come first.
    Activations follow, then gradients from the last module to the first, then the parameter updates that the optimizer
    makes at the end of the step. The order of the modules is that of their calls in the recorded graph.

    Nothing has been computed before step 0, so the parameter values of that step must be equal whatever the tolerance,
    unless repeated runs are given. Parameters whose gradient is only rounding noise are left out, unless the tolerance
    is exact. A step that only one run has is reported as a difference; the comparison continues after it.

    Args:
        one: The first run.
        other: The second run.
        tolerance: The tolerance for numbers; by default ``Tolerance()``.
        recorder: The label of the only recorder to compare; by default all are compared.
        stage: The only stage to compare; by default all are compared.
        names: Rules such as ``"model.layers.*=blocks.*"`` that map module names of the first run to those of the
            second; see :class:`NameMap`. If the runs have no module in common, rules are found from the graphs.
        noise: Further runs of the configuration of the first run. A difference within their spread is no difference.

    Raises:
        ArgumentError: If neither run has any records, the recorder or the stage, if a tolerance is negative, or if a
            rule is invalid.
        DumpError: If a file cannot be read.
    """
    tolerance = tolerance or Tolerance()
    check_number("rtol", tolerance.rtol, 0)
    check_number("atol", tolerance.atol, 0)
    name_map = _name_map(one, other, names)
    differences: list[Difference] = [
        Difference("module name", "", rule, "", "") for rule in name_map.rules if not names
    ]
    graph, changes = one.graph, graph_changes(one, other, name_map)
    changed = {name for change in changes for name in (change.what, *change.others)}
    options: dict[str, Any] = {"order": CallOrder(graph, changed), "names": name_map}
    pairs = list(_pairs(one, other, recorder, stage, differences, noise, options))
    for pair in pairs:
        differences += _differences(pair, name_map)
    dtypes = [_output_dtypes(pairs, place) for place in range(2)]
    rounding = {} if tolerance.exact else {pair: rounding_sites(pair, dtypes) for pair in pairs}
    starts = {} if noise else {pair: _initial(pair) for pair in pairs}
    ordered = [
        (pair, [*starts.get(pair, []), *pair.divergences(tolerance, rounding.get(pair, frozenset()))]) for pair in pairs
    ]
    first = _earliest(ordered)
    bits = Tolerance(exact=True, histograms=False)
    steps = sorted({step for pair in pairs for step in pair.steps})
    before = [step for step in steps if first is None or step < first.step]
    if not pairs or not steps:
        differences = differences or [Difference("step", "", "none in common", "", "")]
    sites = sorted((each for _, found in ordered for each in _once(found)), key=lambda each: -each.furthest.distance)
    return Comparison(
        first=first,
        last_same=before[-1] if before else None,
        sites=sites,
        differences=differences,
        steps=len(steps),
        compared=sum(pair.compared for pair in pairs),
        first_bits=first if tolerance.exact else _earliest([(pair, pair.divergences(bits)) for pair in pairs]),
        changes=distinct([*changes, *series_changes(one, other, name_map), *setting_changes(one, other)]),
        rounding=[site for found in rounding.values() for site in sorted(found)],
        rules=name_map.rules,
        pairs=pairs,
        classes={} if graph is None else {node.name: node.type_name for node in graph.module_calls()},
        notes=[*_unused_rules(name_map, graph, pairs), *_notes(one, other, pairs)],
        bad=_bad(first, (one, other)),
    )


def _bad(first: Divergence | None, runs: tuple[Run, Run]) -> tuple[str | None, str | None]:
    if first is None or (math.isfinite(first.one) and math.isfinite(first.other)):
        return None, None
    found = [[each for each in run.findings if each.rule == "non-finite" and not each.is_note] for run in runs]
    one, other = (each[0].verdict if each else None for each in found)
    return one, other


def _output_dtypes(pairs: Iterable[SeriesPair], place: int) -> dict[str, str]:
    """Return the output dtype of each module in one of the runs, by module name in the first run."""
    found = {}
    for pair in pairs:
        for site in pair.sites if pair.group == "activations" else ():
            dtype = pair.other[pair.counterparts[site]].dtype if place else pair.one[site].dtype
            if site.path == "out" and dtype is not None:
                found[site.name] = dtype
    return found


def _name_map(one: Run, other: Run, rules: Iterable[str]) -> NameMap:
    """Return the map of the rules. Without rules, find a map from the graphs if the runs have no module in common."""
    given = NameMap(rules)
    if given.rules:
        return given
    names = [{site.name for label in run for site in run[label].sites if site.name} for run in (one, other)]
    graphs = one.graph, other.graph
    if graphs[0] is None or graphs[1] is None or not names[0] or not names[1]:
        return given
    found = NameMap(suggest_rules(graphs[0], graphs[1]))
    left = [names[0] - names[1], names[1] - names[0]]
    # All modules of both models must correspond: a model that lost or gained modules is not a renamed model.
    return found if {found(name) for name in left[0]} == left[1] else given


def _pairs(
    one: Run,
    other: Run,
    recorder: str | None,
    stage: str | None,
    differences: list[Difference],
    noise: Sequence[Run],
    options: Mapping[str, Any],
) -> Iterator[SeriesPair]:
    """Yield the series that both runs have, in execution order. Append all other series to ``differences``."""
    there = dict.fromkeys([*one, *other])
    if not there:
        raise ArgumentError(f"neither run has records to compare: {str(one.log_dir)!r} and {str(other.log_dir)!r}")
    labels = [label for label in there if recorder in (None, label)]
    if not labels:
        raise ArgumentError(f"neither run has the recorder {recorder!r}; there are {', '.join(map(repr, there))}")
    both = [label for label in labels if label in one and label in other]
    differences += _only("recorder", "", [each for each in labels if each in one], [e for e in labels if e in other])
    keys = {label: ([*_keys(one[label], stage)], [*_keys(other[label], stage)]) for label in both}
    if stage is not None and both and not any(mine or theirs for mine, theirs in keys.values()):
        raise ArgumentError(f"neither run recorded the stage {stage!r}")
    found = []
    for label, (mine, theirs) in keys.items():
        # Recordings of older versions have no sampled validations, so a missing one is not a difference.
        whole = (
            [_stage_name(key) for key in keys if key in both_keys or not _is_sample(series, key)]
            for series, keys, both_keys in ((one[label], mine, theirs), (other[label], theirs, mine))
        )
        differences += _only("stage", label, *whole)
        group = _group(one[label])
        for key in mine:
            if key in theirs:
                pair = SeriesPair(label, one[label].of(*key), other[label].of(*key), group=group, **options)
                repeats = [run[label].of(*key) for run in noise if label in run and key in [*_keys(run[label], stage)]]
                if noise:
                    pair.bands = noise_bands(pair, pair.one, repeats)
                rank = _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)
                found.append(((key[0] != "train", rank), pair))
    found.sort(key=lambda each: each[0])
    yield from (pair for _, pair in found)


def _keys(series: Series, stage: str | None) -> Iterator[tuple[str, int | None]]:
    # A value that the user logs may be a time or a count, so it is not compared.
    stages = [each for each in series.stages if each != LOGGED] if stage is None else [stage]
    return ((key.stage, key.loader) for key in series.keys if key.stage in stages)


def _is_sample(series: Series, key: tuple[str, int | None]) -> bool:
    """Return True if the records have only the first batches of evaluations."""
    part = series.of(*key)
    return all(part.about(step).get("is_sample") is True for step in part.steps)


def _stage_name(key: tuple[str, int | None]) -> str:
    return key[0] if key[1] is None else f"{key[0]}/{key[1]}"


def _group(series: Series) -> str:
    """Return the group stored in the file, or else the group at the start of the file name."""
    group = series.sessions[-1].about.get("group") if series.sessions else None
    return group if isinstance(group, str) else series.path.stem.partition("-")[0]


def _initial(pair: SeriesPair) -> list[SiteDivergence]:
    """Return the parameters that differ at step 0, before any computation could introduce rounding."""
    if not pair.held or pair.steps[:1] != [0]:
        return []
    settings: dict[str, Any] = {"group": pair.group, "order": pair.order, "names": pair.names}
    values = SeriesPair(pair.recorder, pair.one, pair.other, without=_OF_THE_STEP, **settings)
    return [each for each in values.divergences(_UNTOUCHED) if each.first.step == 0 and each.first.site in pair.held]


def _once(found: Iterable[SiteDivergence]) -> list[SiteDivergence]:
    """Return only the first entry of each site."""
    sites: dict[tuple[str, str], SiteDivergence] = {}
    for each in found:
        sites.setdefault(each.first.site, each)
    return list(sites.values())


def _earliest(ordered: Iterable[tuple[SeriesPair, list[SiteDivergence]]]) -> Divergence | None:
    """Return the first divergence: at the earliest step, values of parameters first, then in the order of the pairs."""
    firsts = []
    for pair, found in ordered:
        held = [each for each in found if each.first.site in pair.held and each.first.statistic not in _OF_THE_STEP]
        rest = [each for each in found if each not in held]
        firsts += [(not is_held, pair.first(part)) for is_held, part in ((True, held), (False, rest)) if part]
    # min returns the first of equal keys.
    return min(firsts, key=lambda each: (each[1].step, each[0]), default=(True, None))[1]


def _differences(pair: SeriesPair, names: NameMap) -> Iterator[Difference]:
    one, other = pair.one, pair.other
    label = pair.recorder if one.stage == "train" else f"{pair.recorder} {_stage_name((one.stage, one.loader))}"
    yield from _only("step", label, map(str, one.steps), map(str, other.steps))
    mapped = [Site(names(site.name), site.path) for site in one.sites]
    yield from _only("site", label, map(_site_name, mapped), map(_site_name, other.sites))
    values = ([name for name in each.statistics if name not in SETTINGS] for each in (one, other))
    yield from _only("statistic", label, *values)
    missing = ~pair.both
    for place, site in enumerate(pair.sites):
        mine, theirs = one[site], other[pair.counterparts[site]]
        for kind, a, b in (("dtype", mine.dtype, theirs.dtype), ("shape", mine.shape, theirs.shape)):
            if a != b and a is not None and b is not None:
                yield Difference(kind, label, _site_name(site), _shown(a), _shown(b))
        if bool(missing[:, place].any()):
            common = set(pair.steps)
            steps = [{step for step in each.steps if step in common} for each in (mine, theirs)]
            if steps[0] != steps[1]:
                numbers = (f"{len(each)} of {len(common)} steps" for each in steps)
                yield Difference("site", label, _site_name(site), *numbers)


def _only(kind: str, label: str, one: Iterable[str], other: Iterable[str]) -> Iterator[Difference]:
    mine, theirs = dict.fromkeys(one), dict.fromkeys(other)
    yield from (Difference(kind, label, each, "yes", "no") for each in mine if each not in theirs)
    yield from (Difference(kind, label, each, "no", "yes") for each in theirs if each not in mine)


def _site_name(site: tuple[str, str]) -> str:
    return site_title(*site)


def _shown(value: str | tuple[int, ...]) -> str:
    return value if isinstance(value, str) else str(list(value))


def _unused_rules(names: NameMap, graph: Graph | None, pairs: list[SeriesPair]) -> Iterator[str]:
    known = {site.name for pair in pairs for site in pair.one.sites}
    known.update(node.name for node in (() if graph is None else graph.module_calls()))
    yield from (f"--map {rule!r} matches no module in A" for rule in names.unused(known))


def _notes(one: Run, other: Run, pairs: list[SeriesPair]) -> Iterator[str]:
    found: dict[str, None] = {}
    for pair in pairs:
        about = [series.sessions[-1].about if series.sessions else {} for series in (pair.one, pair.other)]
        versions = [_mapping(each.get("versions")) for each in about]
        for name in dict.fromkeys([*versions[0], *versions[1]]):
            a, b = (each.get(name) for each in versions)
            if a != b:
                found[f"{name}: {a} in A, {b} in B"] = None
        if about[0].get("ranks") != about[1].get("ranks"):
            found[f"ranks: {about[0].get('ranks')} in A, {about[1].get('ranks')} in B"] = None
        for which, series in (("A", pair.one), ("B", pair.other)):
            if series.skipped:
                found[f"{series.skipped} damaged lines of {pair.recorder} were skipped in {which}"] = None
    yield from found


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
