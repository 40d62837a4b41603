"""The rule about non-finite values: where the first one arose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import NON_FINITE, Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.rule import rule
from lightning_recorder.names import Site, split_call
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats

__all__ = ["first_bad_step"]

# These modules return a NaN only if their input has one, so any other candidate is a more probable origin.
_PASSIVE = ("ReLU", "Dropout", "Identity", "Flatten", "Dropout1d", "Dropout2d", "LeakyReLU", "GELU", "SiLU", "Tanh")


def first_bad_step(evidence: Evidence) -> int | None:
    """Return the first recorded step of training with a NaN; None if all values are numbers or infinities."""
    tables = (evidence.activations, evidence.gradients, evidence.parameters, evidence.inputs)
    return min((step for table in tables for step in _nan_steps(table)), default=None)


def _does_harm(evidence: Evidence, step: int, harmless: int) -> bool:
    """Return False if only outputs had a NaN, and enough later records have finite gradients and parameters."""
    table = evidence.parameters
    later = [each for each in table.steps if each > step]
    return len(later) < harmless or any(_nan_steps(each) for each in (table, evidence.gradients))


def _nan_steps(table: History) -> list[int]:
    return [step for step, bad in zip(table.steps, _rows_with(table, "nan_count").tolist(), strict=True) if bad]


def _rows_with(table: History, statistic: str) -> NDArray[np.bool_]:
    """Return True for each record in which the statistic is above zero at some site, ``[steps]``."""
    counts: Floats = np.nan_to_num(table.get(statistic))
    found: NDArray[np.bool_] = counts.max(axis=1, initial=0.0) > 0
    return found


def _bad(table: History, step: int, *, only_nan: bool = False) -> dict[Site, float]:
    """Return the number of non-finite values (or only of NaN) at each site with any, in the order of execution."""
    if step not in table.steps:
        return {}
    row = table.steps.index(step)
    counts: Floats = np.nan_to_num(table.get("nan_count")[row])
    if not only_nan:  # infinities of inputs are ignored, since an input may be a mask of minus infinity
        counts = counts + np.nan_to_num(table.get("inf_count")[row])
    found = counts.tolist()
    return {site: found[table.places[site]] for site in table.order(row) if found[table.places[site]] > 0}


@rule(
    NON_FINITE,
    "critical",
    statistic="nan_count and inf_count of outputs, gradients and parameters",
    usual="no NaN in any record",
    why="A division by zero, a logarithm or root of zero, an overflow, or a learning rate that is too high.",
    next="Look at the inputs and the statistics of this module at the step before; lower the learning rate, clip "
    "gradients, or add a small constant where the function is undefined.",
    false_alarms="Infinities without NaN, as in attention masks, are a note. Steps that a loss scaler skips do not "
    "count.",
    is_lasting=True,
)
def non_finite(evidence: Evidence, *, harmless: int = 2) -> Iterator[Finding]:
    """Yield the first module with a NaN or an infinity."""
    step = first_bad_step(evidence)
    if step is not None:
        found = _first(evidence, step)
        yield found if _does_harm(evidence, step, harmless) else replace(found, severity="warning")
        return
    # Infinities alone, such as in a mask, do no harm.
    for table, what in ((evidence.activations, "output"), (evidence.gradients, "gradient")):
        rows = _rows_with(table, "inf_count")
        if rows.any():
            step = table.steps[int(rows.argmax())]
            site = next(iter(_bad(table, step)))
            verdict = f"the {what} of {_named(site)} has infinities from step {step} on, and no NaN follows"
            found = View(evidence, table, site).found(verdict, "inf_count", since=step)
            yield replace(found, severity="note", why="Usually a mask of minus infinity before a softmax.")
            return


def _first(evidence: Evidence, step: int) -> Finding:
    values = [each.site for each in evidence.tensors]
    bad = _bad(evidence.parameters, step)
    spoiled = [site for site in values if site in bad]
    if spoiled:
        return _from_parameters(evidence, step, spoiled)
    if outputs := _bad(evidence.activations, step):
        site, fed = _origin(evidence, list(outputs))
        total = outputs[site]
        where = f"the output of {_named(site)} has {total:.0f} values that are not finite at step {step}"
        spoiled_inputs = _bad(evidence.inputs, step, only_nan=True)
        first = next((each for each in evidence.inputs_of(site.name) if each.site in spoiled_inputs), None)
        if first is not None:
            return _from_input(first, step, spoiled_inputs[first.site])
        paths = [each.path for each in evidence.inputs_of(site.name) if step in evidence.inputs.steps]
        if paths:
            clean = f"; its inputs ({', '.join(paths)}) are finite"
        else:  # operations are unknown, since this step may run other code than the recorded graph
            modules = ", ".join(each for each in fed if each != INPUT)
            so = "" if INPUT in fed else ", so it arose in this module or in an operation before it"
            clean = f"; the modules before it ({modules}) are finite{so}" if modules else ""
        table = evidence.activations
        return View(evidence, table, site).found(f"{where}{clean}", "nan_count", since=step, values=total, forward=1)
    if inputs := _bad(evidence.inputs, step, only_nan=True):
        site, count = next(iter(inputs.items()))
        return _from_input(View(evidence, evidence.inputs, site), step, count)
    if gradients := _bad(evidence.gradients, step):
        return _from_backward(evidence, step, gradients)
    site = next(iter(bad))
    verdict = f"{site.path} of {site.name or '(root)'} has {bad[site]:.0f} values that are not finite at step {step}"
    return View(evidence, evidence.parameters, site).found(verdict, "nan_count", since=step, values=bad[site])


def _from_input(view: View, step: int, count: float) -> Finding:
    verdict = (
        f"the input {view.path} of {view.module or '(root)'} has {count:.0f} NaN at step {step}: "
        "they are in the data, or arose in a function before this module"
    )
    return view.found(verdict, "nan_count", since=step, values=count, forward=1)


def _from_parameters(evidence: Evidence, step: int, spoiled: list[Site]) -> Finding:
    table = evidence.parameters
    row = table.steps.index(step)
    before = table.steps[row - 1] if row else None
    since = "at the first record" if before is None else f"between the steps {before} and {step}"
    count = f"{len(spoiled)} of {len(evidence.tensors)} parameters"
    if not row:
        verdict = f"{count} are not finite {since}, {spoiled[0].path} of {spoiled[0].name} first"
    else:
        verdict = f"a value that is not finite arose {since}: at step {step}, {count} have one"
    few = len(spoiled) < len(evidence.tensors)
    site = spoiled[0] if few else Site("", "")
    found = View(evidence, table, site).found(verdict, "nan_count", since=step)
    low = 0 if before is None else before
    again = f"Record every step from {low} to {step} to name the module: every_n_train_steps=1"
    return replace(found, next=f"{again}, schedule=Schedule(step_window=({low}, {step + 1})). {non_finite.next}")


def _origin(evidence: Evidence, bad: list[Site]) -> tuple[Site, list[str]]:
    """Return the site that explains all other non-finite sites, and the modules that feed it if they are all finite.

    Args:
        evidence: The evidence.
        bad: The non-finite sites, in their order of execution in the record.

    Each call of a module is tried as the origin: all modules downstream of it should be non-finite, and no others.
    """
    wiring, names = evidence.wiring, {site.name for site in bad}
    usual = sorted(bad, key=lambda site: evidence.activations.places[site])
    if not wiring.has_graph and bad != usual:  # the order of execution differs from that of the first record
        return bad[0], []
    recorded = {site.name for site in evidence.activations.places}
    outside = {name for name in names if name in wiring.order}
    last = {name: call for call, name in enumerate(wiring.calls)}
    best: tuple[float, bool, int] | None = None
    chosen, missed = "", len(outside - last.keys())
    for call, name in enumerate(wiring.calls):
        # Stop if this call is no better: neither this call nor a later one explains the bad modules before it.
        if best is not None and missed > best[0]:
            break
        missed += name in outside and last[name] == call
        if name in names:
            expected = {wiring.calls[each] for each in wiring.after(call)} & recorded
            wrong = len(expected ^ outside)
            rank = (wrong, wiring.types.get(name, "") in _PASSIVE, call)
            if best is None or rank < best:
                best, chosen = rank, name
    first = bad[0]
    # A bad module whose inner modules are all finite is the origin itself. Its record comes before those of later
    # calls.
    if not chosen or _is_outer(evidence, first, chosen, names):
        return first, []
    fed = wiring.inputs.get(chosen, []) if wiring.has_graph else []
    return next(site for site in bad if site.name == chosen), [] if names.intersection(fed) else fed


def _is_outer(evidence: Evidence, first: Site, chosen: str, names: set[str]) -> bool:
    inner = [site.name for site in evidence.activations.places if site.name.startswith(f"{first.name}.")]
    return bool(inner) and first.name != chosen and not names.intersection(inner)


def _from_backward(evidence: Evidence, step: int, bad: dict[Site, float]) -> Finding:
    wiring, table = evidence.wiring, evidence.gradients
    names = {site.name for site in bad}
    row = table.steps.index(step)
    present = ~np.isnan(table.get("count")[row])
    finite = [site for site, there in zip(table.places, present, strict=True) if there and site not in bad]
    # A module with a finite output gradient whose producer has a bad gradient: its backward pass is at fault.
    guilty = [site for site in finite if names.intersection(wiring.inputs.get(site.name, ()))]
    if guilty:
        site = max(guilty, key=lambda each: wiring.order.get(each.name, table.places[each]))
        fed = next(each for each in wiring.inputs[site.name] if each in names)
        verdict = (
            f"the backward pass of {_named(site)} makes a gradient that is not finite at step {step}: "
            f"the gradient of its output is finite, that of its input from {fed} is not"
        )
    else:
        site = max(bad, key=lambda each: wiring.order.get(each.name, table.places[each]))
        verdict = (
            f"the gradient of the output of {_named(site)} is not finite at step {step}: "
            "it arose after this module, in the loss or in a function without a module"
        )
    return View(evidence, table, site).found(verdict, "nan_count", since=step, forward=0)


def _named(site: Site) -> str:
    inner, call = split_call(site.path)
    return (site.name or "(root)") + call + ("" if inner == "out" else f" ({inner})")
