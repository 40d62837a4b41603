"""The rules about the routers of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.parts import layers_of, listed
from lightning_recorder.insight.recorded_step import step_of
from lightning_recorder.insight.rule import rule
from lightning_recorder.records.table import Floats

_ANY = ("any",)


def _loads(experts: list[View]) -> tuple[Floats, list[int]]:
    """Return the load of each expert, ``[records, experts]``, and the steps. Only records with all experts count."""
    columns = [each.column("router_load") for each in experts]
    if len({len(values) for values, _ in columns}) != 1:
        return np.zeros((0, len(experts))), []
    return np.stack([values for values, _ in columns], axis=1), columns[0][1].tolist()


def _effective(loads: Floats) -> Floats:
    """Return the effective number of experts in each record: the exponential of the entropy of the load."""
    found: Floats = np.exp(-np.sum(loads * np.log(np.where(loads > 0, loads, 1.0)), axis=1))
    return found


def _chosen(expert: View) -> float:
    return float(np.median(expert.router_chosen))


def _scored_by(evidence: Evidence, router: str) -> tuple[str, ...]:
    """Return the name of the layer that computes the scores of a functional router; empty if it is unknown."""
    step, (owner, _, function) = step_of(evidence), router.rpartition(".")
    for node in step.operations:
        if node.name == function.partition("#")[0] and step.owner(node) == owner:
            source = step.behind(node)
            while source is not None and source.kind == "op" and source.name != "linear":  # such as a softmax
                source = step.behind(source)
            return (step.owner(source),) if source is not None and source.kind == "op" else ()
    return ()


@rule(
    "router-collapse",
    statistic="effective number of experts: the exponential of the entropy of the load",
    usual="more than half of the experts",
    why="The router chooses the same experts for all tokens. These learn, so that it prefers them even more.",
    next="Add a loss that balances the load, or a bias for each expert; check its weight, the scale and the learning "
    "rate of the router.",
    false_alarms="A router that starts like this and spreads. The last records must agree.",
    needs=("activations",),
    records=4,
    explains={
        **dict.fromkeys(("starved-expert", "never-chosen", "gradient-stops", "unlike-siblings"), _ANY),
        "scale-jump": ("same",),
    },
)
def router_collapse(
    evidence: Evidence, *, persistence: int = 4, factor: float = 1.25, experts: float = 2.0
) -> Iterator[Finding]:
    """Yield the routers that use hardly more experts for all tokens together than for a single token."""
    for name, members in layers_of(evidence, evidence.experts).items():
        loads, steps = _loads(members)
        chosen = _chosen(members[0]) if steps else 0.0
        if len(steps) < persistence or len(members) < experts * chosen:
            continue
        effective = _effective(loads)
        is_low = effective <= factor * chosen
        if is_low[-persistence:].all():
            first = int(np.flatnonzero(~is_low).max(initial=-1)) + 1
            best = [members[place] for place in np.argsort(-loads[-1], kind="stable")[: max(1, round(chosen))]]
            share = float(sum(loads[-1].tolist()[int(each.path)] for each in best))
            verdict = (
                f"the router {name} sends {share:.0%} of its choices to {listed('expert', best)} of {len(members)}: "
                f"effectively {effective[-1]:.2g} experts, where a token chooses {chosen:.2g}"
            )
            numbers = {"effective": effective[-1], "chosen": chosen}
            others = _scored_by(evidence, name)  # the scores of this layer prefer some experts
            yield best[0].found(verdict, "router_load", since=steps[first], others=others, parts=best, **numbers)


@rule(
    "starved-expert",
    statistic="share of the choices that fall on an expert",
    usual="about 1 / experts",
    why="The router hardly ever chooses the expert, so that it gets no gradient and stays as it is.",
    next="Add a loss that balances the load, or a bias for each expert.",
    false_alarms="Few tokens: in an even load, the expert would get 30 tokens in each record. All records must agree.",
    needs=("activations",),
    records=4,
    explains={**dict.fromkeys(("never-chosen", "gradient-stops", "unlike-siblings"), _ANY), "scale-jump": ("same",)},
)
def starved_expert(
    evidence: Evidence, *, persistence: int = 4, share: float = 0.02, tokens: float = 30.0, most: float = 0.5
) -> Iterator[Finding]:
    """Yield the routers that hardly ever choose some of their experts."""
    for name, members in layers_of(evidence, evidence.experts).items():
        loads, steps = _loads(members)
        if len(steps) < persistence:
            continue
        expected = float(np.median(members[0].router_tokens)) * _chosen(members[0]) / len(members)
        is_low = loads <= share / len(members)
        found = [member for place, member in enumerate(members) if is_low[-persistence:, place].all()]
        if expected >= tokens and 0 < len(found) <= most * len(members):
            places = [int(each.path) for each in found]
            rows = np.flatnonzero(~is_low[:, places].all(axis=1)).max(initial=-1)
            verdict = (
                f"{listed('expert', found)} of {name} got {loads[-persistence:, places].mean():.2%} of the choices in "
                f"each of the last {persistence} records, where {1 / len(members):.0%} would be even"
            )
            since, others = steps[int(rows) + 1], _scored_by(evidence, name)
            yield found[0].found(verdict, "router_load", since=since, others=others, parts=found, experts=len(found))


@rule(
    "router-drift",
    statistic="effective number of experts over the run",
    usual="constant, or growing",
    why="The router prefers some experts more and more: nothing balances the load.",
    next="Add a loss that balances the load, or raise its weight, before the other experts starve.",
    false_alarms="A load that was uneven from the beginning.",
    needs=("activations",),
    records=9,
    explains=dict.fromkeys(("starved-expert", "unlike-siblings"), _ANY),
)
def router_drift(evidence: Evidence, *, records: int = 9, share: float = 0.55) -> Iterator[Finding]:
    """Yield the routers whose effective number of experts falls over the run."""
    for name, members in layers_of(evidence, evidence.experts).items():
        loads, steps = _loads(members)
        if len(steps) < records:
            continue
        effective = _effective(loads)
        third = len(steps) // 3
        first, middle, last = (float(np.median(each)) for each in np.split(effective, (third, len(steps) - third)))
        if last <= share * first and last < middle < first:
            verdict = (
                f"the router {name} uses fewer and fewer of its {len(members)} experts: effectively {first:.2g} at "
                f"first, then {middle:.2g}, and {last:.2g} in the last records"
            )
            best = members[int(np.argmax(loads[-1]))]
            yield best.found(verdict, "router_load", since=steps[third], first=first, last=last)
