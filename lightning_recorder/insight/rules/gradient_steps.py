"""The rule about a single jump in the gradients along a stack of equal blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View, gradient_norms
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import rule
from lightning_recorder.insight.siblings import FORWARD, all_outliers, blocks_of, families_of
from lightning_recorder.names import Site
from lightning_recorder.records.table import Floats

__all__ = ["GRADIENT_STEP"]

GRADIENT_STEP = "gradient-step"
"""The rule about a jump between the gradients of two neighboring blocks."""

_WHY_WITHOUT_SUM = "A factor in this block, a division by the spread of channels that are constant, or a detach()."
_NEXT_WITHOUT_SUM = "Look at what is computed there, with which factors, and for channels that are all zero."


@rule(
    GRADIENT_STEP,
    statistic="L2 norm of the gradients of equal modules in repeated blocks, from one block to the one before it",
    usual="0.3 to 3",
    why="A wrong factor in the residual connection of this block, none at all, or a detach() in a part of it.",
    next="Compare the code of this block with the others: what is added to its input, and with which factors.",
    false_alarms="The gradient may grow in the first block of a GPT-2, which learns to write a large residual stream: "
    "such growth must be in the first record. Gradients that change in several blocks are left to the other rules. "
    "With 8 or more blocks, a 6-fold step between two inner ones counts if it is there in every record and far larger "
    "than all others.",
    needs=("gradients",),
    records=1,
    explains=dict.fromkeys(
        (
            GRADIENT_STEP,
            "unlike-siblings",
            "vanishing-gradient",
            "exploding-gradient",
        ),
        ("any",),
    ),
)
def gradient_step(
    evidence: Evidence,
    *,
    fewest: int = 3,
    factor: float = 12.0,
    share: float = 0.5,
    many: int = 8,
    lone: float = 6.0,
    quiet: float = 1.5,
) -> Iterator[Finding]:
    """Yield the block at which the gradient norm jumps, while it is steady in the blocks before and after."""
    norms = gradient_norms(evidence.gradients)
    order = evidence.wiring.order
    steps: dict[str, list[tuple[Site, Site]]] = {}
    ends: dict[str, str] = {}
    groups = [group for group in families_of(evidence, evidence.gradients, norms, fewest) if _is_chain(evidence, group)]
    for group in groups:
        growth = np.log([norms[site] for site in group[:-1]]) - np.log([norms[site] for site in group[1:]])
        place = int(np.argmax(np.abs(growth)))
        others = float(np.abs(np.delete(growth, place)).max(initial=0.0))
        is_large = abs(growth[place]) - others > np.log(factor) and not _is_learned(evidence, group, growth, quiet)
        if is_large or (len(group) >= many and _is_lone(evidence, group, growth, lone, quiet)):
            blocks = blocks_of([site.name for site in group])
            # A factor at the end of a block and a factor at the beginning of the next block have the same effect on the
            # gradients. The earlier block is named only if its operations are unusual.
            block = blocks[place if _has_other_code(evidence, blocks, place, place + 1) else place + 1]
            ends.setdefault(block, blocks[place])
            steps.setdefault(block, []).append((group[place], group[place + 1]))
    outliers = all_outliers(evidence) if steps else ()
    sick = [site.name for kind, _, _, _, site, _, _ in outliers if kind < FORWARD]
    for block, found in steps.items():
        # A block with a finding about its outputs is left out: outputs are nearer to the cause than gradients.
        if any(each.startswith((f"{block}.", *_before(block, groups))) for each in sick):
            continue
        same_sign = len({norms[site] > norms[behind] for site, behind in found}) == 1
        if same_sign and len(found) >= share * len(groups):
            last = max(found, key=lambda each: order.get(each[0].name, -1))
            yield _grown(evidence, block, *last, norms, end=ends[block])
    for group in groups:
        found_before = _before_first(evidence, norms, group, factor)
        if found_before is not None:
            yield _grown(evidence, blocks_of([site.name for site in group])[0], *found_before, norms)
            return


def _before(block: str, groups: list[list[Site]]) -> Iterator[str]:
    """Yield the name of the block before a block, with a dot."""
    for group in groups:
        names = blocks_of([site.name for site in group])
        if block in names[1:]:
            yield f"{names[names.index(block) - 1]}."


def _is_learned(evidence: Evidence, group: list[Site], growth: Floats, quiet: float) -> bool:
    """Return True if the gradient grows most in the first block, but did not grow there in the first record.

    A factor in the code has its effect from the start. If the first block learns to write a large residual stream, the
    gradient grows there only later, since the following normalizations divide by the size of the stream.
    """
    if np.argmax(np.abs(growth)) != 0 or growth[0] < 0:
        return False
    table = evidence.gradients
    first, behind = (table.get("rms") * np.sqrt(table.get("count")))[0, [table.places[site] for site in group[:2]]]
    return bool(first < quiet * behind)


def _is_lone(evidence: Evidence, group: list[Site], growth: Floats, lone: float, quiet: float) -> bool:
    """Return True if one jump between two inner blocks is larger than all others, in every record."""
    place = int(np.argmax(np.abs(growth)))
    others = np.abs(np.delete(growth, place))
    if place in (0, len(growth) - 1) or np.median(others) > np.log(quiet):
        return False
    table = evidence.gradients
    norms = (table.get("rms") * np.sqrt(table.get("count")))[
        :, [table.places[site] for site in group[place : place + 2]]
    ]
    each = np.sign(growth[place]) * np.log(norms[:, 0] / norms[:, 1])
    least, size = np.log(lone), abs(growth[place])
    each = each[np.isfinite(each)]
    return bool(size > max(least, others.max() + least / 2) and len(each) and each.min() > least / 2)


def _has_other_code(evidence: Evidence, blocks: list[str], place: int, other: int) -> bool:
    """Return True if the operations of block ``place`` are unusual and those of block ``other`` are usual."""
    found = [evidence.wiring.operations.get(block, ()) for block in blocks]
    usual = Counter(found).most_common(1)[0][0]
    return bool(found[place] != usual and found[other] == usual)


def _grown(
    evidence: Evidence, block: str, site: Site, behind: Site, norms: Mapping[Site, float], *, end: str = ""
) -> Finding:
    """Return the finding about a block in which the gradient norm changes between the sites ``behind`` and ``site``.

    If ``site`` is in the previous block, ``end``, the cause may also be at the end of that block.
    """
    here, after = norms[site], norms[behind]
    factor, way = (here / after, "grows") if here > after else (after / here, "shrinks")
    place = f"{block} or the end of {end}" if end not in ("", block) else block
    if end == site.name:  # the blocks are layers, perhaps with others between them
        place = f"{behind.name} or what is between {site.name} and it"
    table = evidence.gradients
    ends = (table.get("rms") * np.sqrt(table.get("count")))[0, [table.places[site], table.places[behind]]]
    ratio = ends[0] / ends[1] if here > after else ends[1] / ends[0]
    first = ratio if np.isfinite(ratio) else 0.0
    verdict = (
        f"the gradient {way} {factor:.3g}-fold on its way back through {place}: its norm is {after:.3g} behind it and "
        f"{here:.3g} at {site.name}"
    )
    found = View(evidence, table, site).found(verdict, "rms", factor=factor, first=first)
    if evidence.wiring.has_graph and not _adds_branches(evidence):
        found = replace(found, why=_WHY_WITHOUT_SUM, next=_NEXT_WITHOUT_SUM)
    return replace(found, module=block)


def _adds_branches(evidence: Evidence) -> bool:
    """Return True if the model has a sum of two tensors, such as a residual connection."""
    graph = evidence.graph
    sums = (node for node in graph.nodes if node.name.strip("_") in ("add", "iadd"))
    return any(node.kind == "op" and len(graph.into(node)) > 1 for node in sums)


def _before_first(
    evidence: Evidence, norms: Mapping[Site, float], group: list[Site], factor: float
) -> tuple[Site, Site] | None:
    """Return the sites before and after the first block, if their gradient norms are too different; otherwise None.

    The group must be the outputs that the blocks add to a residual stream. The site before the first block must be the
    stream to which the first block adds its output, so that both feed the second block.
    """
    table, wiring = evidence.gradients, evidence.wiring
    blocks = blocks_of([site.name for site in group])
    inside = tuple(f"{block}." for block in blocks)
    feeds = [wiring.inputs[name] for name in wiring.outputs.get(group[0].name, ()) if name.startswith(inside[1])]
    stems = {Site(name, "out") for names in feeds for name in names if not name.startswith(inside)}
    shape = table.shapes[table.places[group[0]]]
    stems = {site for site in stems if site in norms and table.shapes[table.places[site]] == shape}
    if len(stems) != 1:
        return None
    stem = stems.pop()
    size = evidence.medians(evidence.activations, "rms").get(stem, np.nan)
    logs = np.log([norms[site] for site in (stem, *group)])
    growth = -np.diff(logs)
    # A normalization in the block divides by the size of the stream and scales the gradient by the inverse of the size.
    limit = factor * (max(1.0, 1.0 / size) if growth[0] > 0 else 1.0)
    is_large = abs(growth[0]) - float(np.abs(growth[1:]).max()) > np.log(limit)
    return (stem, group[0]) if is_large else None


def _is_chain(evidence: Evidence, group: list[Site]) -> bool:
    """Return True if each module feeds the next one, unlike heads with separate losses, or experts."""
    return all(evidence.wiring.leads(site.name, after.name) for site, after in pairwise(group))
