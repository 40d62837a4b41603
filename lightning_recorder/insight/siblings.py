"""Compare siblings, the corresponding modules of repeated blocks, and find those with unusual values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_recorder.insight.evidence import Evidence, gradient_norms
from lightning_recorder.insight.module_edges import families
from lightning_recorder.insight.odd_blocks import odd_blocks
from lightning_recorder.names import Site
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats

__all__ = [
    "FORWARD",
    "INITIAL",
    "LIMITS",
    "WEIGHT_GRADIENT",
    "SiblingLimits",
    "all_outliers",
    "blocks_of",
    "families_of",
    "initial_steps",
    "sibling_values",
]

INITIAL = ("rms of the weight", "rms of the vector")
"""The names, in words, of the statistics that are compared in the first record."""

WEIGHT_GRADIENT = "rms of the weight gradient"
"""The name, in words, of a statistic that a hook or a factor may change while the output gradients look normal."""

FORWARD = 3
"""The number of statistics of the forward pass, which are compared first."""


@dataclass(frozen=True)
class SiblingLimits:
    """The limits of a comparison of siblings."""

    fewest: int = 4  # the least number of siblings
    factor: float = 8.0  # the least factor between a value and the median of its siblings
    margin: float = 4.0  # the least factor between a value and the nearest sibling's value
    at_the_end: float = 3.0  # an additional factor for the first and the last block, which have other neighbors
    vector: float = 4.0  # an additional factor for biases and other vectors, and for the gradients of weights
    zero: float = 1e-6  # the largest rms of a parameter that counts as zero


LIMITS = SiblingLimits()
"""The default limits."""

_MOST_MEMBERS = 64  # the most members of a list that are examined

_Outlier = tuple[Site, float, Floats]


def sibling_values(evidence: Evidence) -> Iterator[tuple[History, str, str, dict[Site, float]]]:
    """Yield the compared statistics: the history, the statistic, its name in words, and a value for each site.

    The first three statistics belong to the forward pass. Differences in them may cause differences in later ones.
    """
    weights = dict.fromkeys(each.site for each in evidence.weights)  # keeps the order of the blocks
    activations, parameters = evidence.activations, evidence.parameters
    yield activations, "rms", "rms of the output", _outputs(evidence.medians(activations, "rms"))
    first = {site: parameters.column(site, "rms")[0] for site in weights}
    yield parameters, "rms", INITIAL[0], {site: float(found[0]) for site, found in first.items() if len(found)}
    others = (each.site for each in evidence.tensors if each.site not in weights)
    first = {site: parameters.column(site, "rms")[0] for site in others}
    yield parameters, "rms", INITIAL[1], {site: float(found[0]) for site, found in first.items() if len(found)}
    yield evidence.gradients, "rms", "norm of the gradient", gradient_norms(evidence.gradients)
    ratios = evidence.medians(parameters, "update_ratio")
    yield parameters, "update_ratio", "relative update", {site: ratios[site] for site in weights}
    sizes = evidence.medians(parameters, "rms")
    found = {each.gradient.site: sizes[each.gradient.site] for each in evidence.weights if each.gradient}
    yield parameters, "rms", WEIGHT_GRADIENT, found


def _outputs(values: Mapping[Site, float]) -> dict[Site, float]:
    return {site: value for site, value in values.items() if site.path == "out"}


def families_of(evidence: Evidence, table: History, values: Mapping[Site, float], fewest: int) -> Iterator[list[Site]]:
    """Yield groups of corresponding sites with equal shapes in blocks of one class, in the order of the blocks."""
    types = evidence.wiring.types
    by_path: dict[str, dict[str, object]] = {}
    for site in values:
        parts = site.name.split(".")
        around = tuple(types.get(".".join(parts[:length])) for length in range(1, len(parts)))
        by_path.setdefault(site.path, {})[site.name] = table.shapes[table.places[site]], around
    for path, keys in by_path.items():
        for names in families(keys, fewest):
            family = [Site(name, path) for name in names]
            if _is_loop(evidence, names):
                continue
            yield from (group for group in _of_one_class(evidence, family) if len(group) >= fewest)


def _is_loop(evidence: Evidence, names: Sequence[str]) -> bool:
    """Return True if the names are calls of one function and outnumber the weights around it, as in a recurrence."""
    if not evidence.wiring.has_graph or len({name.partition("#")[0] for name in names}) > 1:
        return False
    around, graph = names[0].rpartition(".")[0], evidence.graph
    matrices = (
        each for each in graph.nodes if each.kind == "parameter" and each.outputs and len(each.outputs[0].shape) > 1
    )
    used = [each for each in matrices if around in {outer.name for outer in graph.ancestors(each)}]
    return len(used) < len(names)


def _of_one_class(evidence: Evidence, family: list[Site]) -> list[list[Site]]:
    """Return a family, split by class if it is a sequence of layers rather than of blocks."""
    names = [site.name for site in family]
    if blocks_of(names) != names:
        return [family]
    found: dict[str, list[Site]] = {}
    for site in family:
        found.setdefault(evidence.type_of(site.name), []).append(site)
    return list(found.values())


def all_outliers(
    evidence: Evidence, limits: SiblingLimits = LIMITS
) -> Iterator[tuple[int, History, str, str, Site, float, Floats]]:
    """Yield each site that is unlike its siblings: statistic, site, the site's value, and the values of its siblings.

    The statistic is given by number, history, name, and name in words. Blocks that may differ by design are left out.
    """
    others_kind = tuple(
        f"{each.block}." for each in odd_blocks(evidence.graph) if each.may_be_design and not each.is_doubtful
    )
    for kind, (table, statistic, words, values) in enumerate(sibling_values(evidence)):
        outliers: list[_Outlier] = []
        firsts: list[_Outlier] = []
        is_second_odd = False
        for group in families_of(evidence, table, values, limits.fewest):
            if words.endswith("gradient") and _are_experts(evidence, group):
                continue  # the gradient of an expert depends on the number of its tokens
            found = list(_outliers(values, group, words, limits))
            # If the residual stream is small, a first block without a norm has small outputs, and a first block with a
            # norm has large gradients. So the limits for the first block are raised by this factor.
            if any(site is group[0] for site, _, _ in found) and words.endswith(("output", "gradient")):
                found = list(_outliers(values, group, words, limits, 1 / _entering(evidence, group)))
            outliers += found
            if words.endswith("output"):
                is_second_odd |= any(site is group[1] for site, _, _ in found)
                as_others = list(_outliers(values, group, words, limits, 1 / limits.at_the_end))
                firsts += [each for each in as_others if each[0] is group[0]]
        if is_second_odd:  # a fault of the first block may be visible only in the outputs of the second block
            known = {site for site, _, _ in outliers}
            outliers = [each for each in firsts if each[0] not in known] + outliers
        for site, value, others in outliers:
            if not site.name.startswith(others_kind):
                yield kind, table, statistic, words, site, value, others


def initial_steps(evidence: Evidence, table: History, site: Site, limits: SiblingLimits) -> list[int]:
    """Return the first steps in which a parameter that began unlike its siblings still has an unusual rms."""
    values = table.get("rms")
    is_known = ~np.isnan(values)
    alike = {each: 1.0 for each, at in table.places.items() if each.path == site.path and is_known[:, at].any()}
    groups = families_of(evidence, table, alike, limits.fewest)
    others = [table.places[each] for group in groups if site in group for each in group if each != site]
    own = values[:, table.places[site]]
    rows = np.flatnonzero(is_known[:, table.places[site]])
    far = (np.abs(np.log(own / np.median(values[:, others], axis=1))) > np.log(limits.factor))[rows]
    count = max(1, len(far) if far.all() else int(far.argmin()))
    return [table.steps[row] for row in rows[:count]]


def _are_experts(evidence: Evidence, group: list[Site]) -> bool:
    """Return True if modules are experts, that is, members of a list of equal modules that do not feed each other.

    A list outside of a block may be a list of towers instead. Unlike an expert, each tower gets the whole batch in
    every record.
    """
    wiring, name = evidence.wiring, group[0].name
    numbers = re.finditer(r"(?<=\.)[0-9]+(?=\.|$)", name)
    for place, digits in enumerate(numbers):
        before = name[: digits.start()]
        members = {f"{before}{number}" for number in range(_MOST_MEMBERS) if f"{before}{number}" in wiring.types}
        kinds = {wiring.types[each] for each in members}
        is_list = len(members) > 1 and len(kinds) == 1 and wiring.is_parallel(before)
        if is_list and (place > 0 or _get_parts(evidence, group)):
            return True
    return False


def _get_parts(evidence: Evidence, group: list[Site]) -> bool:
    """Return True if in some record the outputs of the modules differ in size, or some of them are missing."""
    table = evidence.activations
    places = [table.places[site] for each in group if (site := Site(each.name, "out")) in table.places]
    counts = np.nan_to_num(table.get("count")[:, places])
    return bool((counts != counts[:, :1]).any())


def _entering(evidence: Evidence, group: list[Site]) -> float:
    """Return the smallest rms of the tensors that enter the first block; at most 1, and 1 if it is unknown."""
    inside, sizes = f"{blocks_of([site.name for site in group])[0]}.", evidence.medians(evidence.activations, "rms")
    inputs = ((name, each) for name, feeds in evidence.wiring.inputs.items() for each in feeds)
    feeds = {each for name, each in inputs if name.startswith(inside) and not each.startswith(inside)}
    found = [size for each in feeds if (size := sizes.get(Site(each, "out"), np.nan)) > 0]
    return min([1.0, *found])


def _outliers(
    values: Mapping[Site, float], group: list[Site], words: str, limits: SiblingLimits, first: float = 1.0
) -> Iterator[_Outlier]:
    """Yield the sites whose values are far from the others; ``first`` is an additional factor for the first block."""
    known = np.array([values[site] for site in group])
    is_vector = words.endswith("vector")
    wider = limits.vector if is_vector or words == WEIGHT_GRADIENT else 1.0
    # Only the largest and the smallest value can be far from all others.
    for place in sorted({int(known.argmin()), int(known.argmax())}) if np.isfinite(known).all() else ():
        site, value, others = group[place], float(known[place]), np.delete(known, place)
        is_end = place in (0, len(group) - 1)
        if not (value > 0 and (others > 0).all()):
            # One parameter begins at zero and no other does, or all others begin at zero.
            is_one = (others > limits.zero).all() if value == 0 else value > limits.zero and not others.any()
            if is_one and not is_end and words.endswith(("weight", "vector")):
                yield site, value, others
            continue
        # Larger differences are normal in the first and the last block, since one of their neighbors is not a block.
        factor = wider * (limits.at_the_end if is_end else 1.0) * (first if place == 0 else 1.0)
        middle, limit, margin = float(np.median(others)), limits.factor * factor, limits.margin * factor
        if (value > limit * middle and value > margin * others.max()) or (
            # A single small vector is normal: one of several learned scales may be small by chance.
            not is_vector and value * limit < middle and value * margin < others.min()
        ):
            yield site, value, others


def blocks_of(names: list[str]) -> list[str]:
    """Return the name of the block around each of several corresponding modules."""
    parts = [name.split(".") for name in names]
    place = next(place for place, each in enumerate(zip(*parts, strict=True)) if len(set(each)) > 1)
    return [".".join(each[: place + 1]) for each in parts]
