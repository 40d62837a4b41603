"""Rules about parts that no optimizer has: layers that were never trained, and copies of trained parts."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import SPIKE, Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.recorded_step import RecordedStep, step_of
from lightning_recorder.insight.rule import GRAPH, rule

__all__ = ["after_a_copy", "held_parts"]


@rule(
    "never-trained",
    statistic="weights, biases and running statistics of layers that no optimizer has, before the first recorded step",
    usual="pretrained layers: normalizations other than one and zero, biases other than zero, weights of no bound",
    why="The weights were not loaded: load_state_dict(strict=False) with keys of another prefix, loading before the "
    "layers were made anew, or no loading at all.",
    next="Print the result of load_state_dict: missing_keys must be empty. Load last, and freeze after that.",
    false_alarms="Random features on purpose, which is a note, unless all that is trained follows four or more such "
    "layers, with nothing trained before or between them.",
    needs=("parameters",),
    explains={"frozen": ("any",), "one-class-predicted": ("any",)},
)
def never_trained(evidence: Evidence, *, layers: int = 4, partly: int = 3) -> Iterator[Finding]:
    """Yield layers that no optimizer has, and that have the values of an initialization."""
    held = held_parts(evidence)
    updated = {each.module for each in evidence.tensors}
    as_made, learned = ([name for name in held.get(key, ()) if name not in updated] for key in ("as_made", "learned"))
    wiring = evidence.wiring
    as_made.sort(key=lambda name: wiring.order.get(name, -1))
    if len(as_made) < (partly if len(learned) >= partly else layers + len(learned)):
        return
    others = f", while {len(learned)} others have trained values" if learned else ""
    verdict = (
        f"{as_made[0]} and {len(as_made) - 1} other layers are not trained and have the values of an initialization"
        f"{others}"
    )
    found = evidence.view(evidence.parameters, as_made[0]).found(
        verdict, others=tuple(as_made[1:]), layers=len(as_made), learned=len(learned)
    )
    trained = {each.module for each in evidence.tensors if each.gradient and wiring.inputs.get(each.module)}
    part = _part_of([*as_made, *learned])
    # Layers inside of a fused module are not called themselves, so that the rest of their part stands for them.
    is_apart = bool(part) and not any(name.startswith(part) for name in trained)
    called = {name for name in wiring.inputs if name in as_made or (is_apart and name.startswith(part))}
    begins = not any(wiring.upstream(name) & trained for name in called)
    if trained and begins and all(_passes(evidence, name, called) for name in trained):
        verdict += f": all that {min(trained, key=lambda name: wiring.order[name])} gets has passed them"
        yield replace(found, verdict=verdict)
    else:
        yield replace(found, severity="note", why="Random features, or weights that were not loaded.")


def _part_of(names: Sequence[str]) -> str:
    """Return the innermost module around all names, with a final dot; an empty string for the root."""
    first, last = min(names).split("."), max(names).split(".")
    same = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
    return "".join(f"{each}." for each in first[:same])


def _passes(evidence: Evidence, name: str, called: Container[str]) -> bool:
    """Return True if a module gets outputs of some modules, and inputs of the model only through them."""
    found, seen, todo = False, {name}, [name]
    while todo:
        for each in evidence.wiring.inputs.get(todo.pop(), ()):
            if each == INPUT:
                return False
            found |= each in called
            if each not in seen and each not in called:
                seen.add(each)
                todo.append(each)
    return found


def held_parts(evidence: Evidence) -> Mapping[str, Any]:
    """Return the facts about parameters that no optimizer has; empty if there are none."""
    found = evidence.parameters.about.get("held")
    return found if isinstance(found, Mapping) else {}


_SPIKES = (SPIKE, "gradient-spike")
_AFTERWARDS = 10  # the number of steps after a move of a copy in which a spike may follow from it


def after_a_copy(finding: Finding, evidence: Evidence) -> Finding:
    """Return a spike as a note if a copy that the step uses and that moves rarely has moved just before it."""
    if finding.rule not in _SPIKES or finding.is_note:
        return finding
    for copy in _copies(evidence):
        for since, until in copy.facts.get("moves", ()):
            if since <= finding.first_step <= until + _AFTERWARDS:
                verdict = f"{finding.verdict}; {copy.name} has moved between steps {since} and {until}"
                return replace(finding, severity="note", verdict=verdict, why=_WHY_MOVED, next=_NEXT_MOVED)
    return finding


_WHY_MOVED = "The step uses a copy of a trained part, such as a target network, and this copy moved just before it."
_NEXT_MOVED = "Nothing, if the copy is meant to move at intervals. A small step in each update avoids the jump."


@dataclass(frozen=True)
class _Copy:
    """A copy of a trained part that the recorded step uses."""

    name: str
    of: str
    facts: Mapping[str, Any]
    is_compared: bool  # True if it gets the same inputs as the trained part that its output meets
    is_bootstrapped: bool  # True if its output is combined with the batch before that, as for a target of Q-learning

    def found(self, evidence: Evidence, verdict: str, **numbers: float) -> Finding:
        table = evidence.activations if len(evidence.activations) else evidence.parameters
        return replace(evidence.view(table, self.name).found(verdict), numbers=numbers)


def _copies(evidence: Evidence) -> Iterator[_Copy]:
    """Yield the copies whose parameters the recorded step uses."""
    step = step_of(evidence)
    for facts in held_parts(evidence).get("copies", ()):
        name, of = str(facts["copy"]), str(facts["of"])
        if any(node.kind == "parameter" and node.name.startswith(f"{name}.") for node in evidence.graph.nodes):
            yield _Copy(name, of, facts, *_meetings(step, name, of))


def _meetings(step: RecordedStep, copy: str, of: str) -> tuple[bool, bool]:
    """Return whether a copy gets an input of the part that its output meets, and whether the batch changes its output.

    An output meets another one in an operation that has both among its sources, such as a loss.
    """
    entries: dict[str, dict[int, set[int]]] = {copy: {}, of: {}}
    changed: set[int] = set()
    for node in step.operations:
        sources, owner = step.sources(node), f"{step.owner(node)}."
        for part, known in entries.items():
            own = set[int]().union(*(known.get(each.id, ()) for each in sources))
            if owner.startswith(f"{part}."):
                given = (each for each in sources if each.kind not in ("parameter", "buffer"))
                new = {step.made_by(each).id for each in given if each.id not in known}
                own |= new or ({node.id} if not own else set())
            if own:
                known[node.id] = own
        theirs = entries[copy]
        if node.id in theirs and not owner.startswith(f"{copy}."):
            is_of_batch = any(step.roots[each.id] == {"input"} for each in sources)
            if (is_of_batch and node.name.strip("_") in _COMBINES) or any(each.id in changed for each in sources):
                changed.add(node.id)
    are_same, are_changed = set(), set()
    for node in step.operations:
        sources = step.sources(node)
        copies = [each for each in sources if each.id in entries[copy] and each.id not in step.trained]
        trained = [each for each in sources if each.id in entries[of] and each.id in step.trained]
        for one in copies:
            for other in trained:
                are_same.add(bool(entries[copy][one.id] & entries[of][other.id]))
                are_changed.add(one.id in changed)
    return True in are_same or not are_same, True in are_changed


_COMBINES = ("add", "radd", "sub", "rsub", "mul", "rmul", "gather", "where")


@rule(
    "copy-stays",
    statistic="values of a part without an optimizer that begins with those of a trained part, at recorded steps",
    usual="a target network or a teacher follows the trained part",
    why="The update of the copy is missing, is never reached, or changes another object.",
    next="Update the copy after each optimizer step: copy = momentum × copy + (1 - momentum) × weight.",
    false_alarms="A reference model that gets the same inputs is meant to stay and is left out. A copy that began with "
    "trained weights is a note, as is a target of Q-learning, which may be updated once in thousands of steps.",
    needs=("parameters", GRAPH),
    records=10,
    explains={"frozen": ("any",)},
)
def copy_stays(
    evidence: Evidence, *, persistence: int = 10, steps: int = 100, rare: int = 2000, moved: float = 1e-3
) -> Iterator[Finding]:
    """Yield the copies that never follow their original."""
    for each in _copies(evidence):
        facts, table = each.facts, evidence.parameters
        length = table.steps[-1] - table.steps[0] if len(table) else 0
        # An average that was computed once is no update that is due at intervals.
        is_once = facts["followed"] == 1 and (facts["factor"] or 1.0) < 0.5
        if each.is_compared or not facts["begins_equal"] or (facts["followed"] and not is_once):
            continue
        if (
            facts["records"] < persistence
            or facts["moved"] < moved
            or length < (rare if each.is_bootstrapped else steps)
        ):
            continue
        what = "has moved once" if is_once else "has not moved"
        verdict = (
            f"{each.name} began with the values of {each.of} and {what} in {length} steps, in which {each.of} moved by "
            f"{facts['moved']:.1%} of its size"
        )
        found = each.found(evidence, verdict, moved=facts["moved"], records=facts["records"])
        is_sure = facts["is_as_made"] and not each.is_bootstrapped
        yield found if is_sure else replace(found, severity="note", why="A fixed teacher, or a missing update.")


@rule(
    "copy-without-lag",
    statistic="factor by which a copy moves to its original in recorded steps, and its distance before them",
    usual="0.001 to 0.1 in each step, or 1 once in many steps",
    why="The factor of the average is exchanged with the momentum, or the copy is overwritten in each step.",
    next="Look at the factors: copy = momentum × copy + (1 - momentum) × weight, with a momentum such as 0.995.",
    false_alarms="An old policy that gets the same inputs as the new one is left out. Copies that are overwritten at "
    "intervals are behind by several steps before that.",
    needs=("parameters", GRAPH),
    records=5,
    explains={"frozen": ("any",)},
)
def copy_without_lag(
    evidence: Evidence, *, persistence: int = 5, factor: float = 0.9, share: float = 0.9, lag: float = 0.2
) -> Iterator[Finding]:
    """Yield the copies that are equal or nearly equal to their original after each step."""
    for each in _copies(evidence):
        facts = each.facts
        if each.is_compared or facts["factors"] < max(persistence, share * min(facts["records"], 100)):
            continue
        if facts["factor"] > factor and facts["lag"] < lag:
            verdict = (
                f"{each.name} moves by {facts['factor']:.4g} of the way to {each.of} in each step: it is no slower copy"
            )
            yield each.found(evidence, verdict, factor=facts["factor"], lag=facts["lag"])


@rule(
    "copy-statistics-stay",
    statistic="running statistics of a copy in evaluation mode, and of the trained part, at recorded steps",
    usual="the running statistics follow like the parameters",
    why="The update copies parameters() and not buffers(), which have the running mean and variance.",
    next="Copy the buffers, too: for one, other in zip(copy.buffers(), net.buffers()): one.copy_(other).",
    false_alarms="Copies in training mode have statistics of their own. A copy that began with trained weights is a "
    "note.",
    needs=("parameters", GRAPH),
    records=5,
)
def copy_statistics_stay(evidence: Evidence, *, persistence: int = 5, share: float = 0.9) -> Iterator[Finding]:
    """Yield the copies whose parameters follow their original and whose running statistics do not."""
    for each in _copies(evidence):
        facts = each.facts
        follows = facts["followed"] >= max(persistence, share * facts["records"])
        if follows and facts["evaluates"] and facts["buffers_moved"] and not facts["buffers_followed"]:
            verdict = (
                f"the parameters of {each.name} follow {each.of}, but its running statistics never move, although it "
                "is in evaluation mode and uses them"
            )
            found = each.found(evidence, verdict, records=facts["records"])
            yield found if facts["is_as_made"] else replace(found, severity="note")
