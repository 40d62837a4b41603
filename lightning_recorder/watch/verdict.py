"""Create the findings of the watch, with their texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_recorder.insight import ACTED, NON_FINITE, ORIGIN_VALUES, ROSE, SPIKE, UNBOUNDED, Finding, Trace
from lightning_recorder.watch.origin import Origin
from lightning_recorder.watch.readings import Reading
from lightning_recorder.watch.spikes import JUMP, LEAST, RECENT, Rise

__all__ = [
    "finding_of_action",
    "finding_of_fall",
    "finding_of_origin",
    "finding_of_overflow",
    "finding_of_spike",
    "finding_without_origin",
    "with_batch",
    "with_older_parameters",
    "with_rise",
    "with_row",
    "with_row_before",
    "with_spike",
    "with_stay",
]

_MOST_ROWS = 8  # the maximum number of listed rows of a batch
_FAR = 10.0  # a gradient norm this many times above the limit of a spike is not explained by a single sample
_LOW = 0.5  # below this share of the first losses, a single sample that does not fit can make a spike
_WHY_LOW = "The loss is low, so that a single sample that does not fit makes most of the gradient."
_WHY_SMALL = "The usual loss is close to zero, so that one sample that does not fit is many times as much."
_NEXT_SMALL = "Nothing, if the loss comes back. Lower the learning rate towards the end if spikes repeat."
_WHY_STEEP = "The loss does not rise with the gradient: it is steep here, as at the end of a plateau."
_MOST_ACTIONS = 60  # the maximum number of steps in a trace, as in other traces
_AT = " at step "
_RECENTLY = f"or below {JUMP:g} × the largest of the {RECENT} steps before"
_COUNTED = f"each above {JUMP:g} × the largest of the {RECENT} steps before it"
_FARTHEST = "farthest above the median"
_LARGEST = f"; the {_FARTHEST}{_AT}"
_WORST = f"; the worst{_AT}"
_WHY = "A division by zero, a logarithm or root of zero, an overflow, or a learning rate that is too high."
_WHY_UNBOUNDED = "The loss has no lower bound: it or one of its terms has the wrong sign, or rewards large values."
_NEXT_UNBOUNDED = "Look at the sign of each term of the loss, and at what keeps it from falling further."
_NEXT = "add a small constant where the function is undefined, lower the learning rate, or clip gradients."
_OVERFLOWS = (
    "The result is too large for its number format.",
    "lower the learning rate, clip gradients, or keep the values small, such as by a norm.",
)
# Operations that can make a bad value from finite inputs, with the reason and the advice.
_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("div", "true_divide", "reciprocal", "remainder", "fmod"),
        "A division by zero, or by a number so small that the quotient overflows.",
        "add a small constant to the divisor, or leave out what is divided by zero.",
    ),
    (
        ("log", "log2", "log10", "log1p", "logit", "xlogy"),
        "A logarithm of zero or of a negative number.",
        "clamp the argument of the logarithm, or add a small constant to it.",
    ),
    (
        ("sqrt", "rsqrt", "norm", "linalg_vector_norm", "std"),
        "A root of a negative number, or one of zero, whose gradient is infinite.",
        "add a small constant to the argument of the root.",
    ),
    (("exp", "exp2", "expm1", "mm", "addmm", "bmm", "baddbmm", "sum", "mean", "convolution", "square"), *_OVERFLOWS),
)
# In the forward pass of these operations, the only finite inputs that make NaN are negative.
_SIGNED = ("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow")
_WHY_NEGATIVE = "A root, a logarithm or a fractional power of a negative number."
_SIMPLE = ("add", "sub", "rsub", "mul")  # finite inputs never make NaN in these operations
_WHY_NUMBER = "A number that this operation uses is NaN or infinite."
_OR_NUMBER = "Or a number that this operation uses is infinite."
_WHY_CONSTANT = "The value was there before the operation: it is no batch, parameter or result of the step."
_WHY_INFINITY = (
    "Infinity minus infinity, infinity times zero, and a softmax over minus infinity alone, as in a row that a mask "
    "hides completely, are NaN."
)


def finding_of_origin(origin: Origin, reading: Reading, batch_idx: int, *, rank: str = "") -> Finding:
    """Return the finding for a bad value whose origin is known.

    ``rank`` is the text after the batch, such as ``", the last of each epoch, rank 1"``; often empty.
    """
    where = f"{_batches([batch_idx], reading.epoch)}{rank}"
    values = f"{origin.count} {origin.kind} values" if origin.count > 1 else f"{origin.kind}"
    at = f" at {_short(origin.line)}" if origin.line else ""
    operation = origin.operation
    numbers = {"batch": float(batch_idx), "epoch": float(reading.epoch), "call": float(origin.call)}
    where_to_look = "this line and its inputs" if origin.line else "the code of this module and its inputs"
    why, following = _WHY, f"Look at {where_to_look}: {_NEXT}"
    if origin.source.startswith("parameter "):
        name = origin.source.removeprefix("parameter ")
        verdict = f"parameter {name} is not finite at the start of step {reading.step} ({where}): {values}"
        why = "The optimizer step before made it so, or it was loaded or set like this. The gradients were finite."
        following = "Lower the learning rate, raise the optimizer's eps, or check what else writes to this parameter."
    elif origin.source.startswith("batch"):
        verdict = f"the batch itself is not finite at step {reading.step} ({where}): {values} in {origin.source}"
        why = "A sample with missing or corrupt values, or a transform that divides by zero."
        following = "Look at the samples of this batch, and check or drop values that are not finite in the dataset."
    else:
        part = "backward" if origin.backward else "forward"
        call = f" (call {origin.call})" if origin.call > 1 else ""
        what = f"{'backward of ' if origin.backward else ''}{operation}{at}" if operation else ""
        what = f"a backward hook{at}" if origin.backward and operation == "hook" else what
        inputs = "its input has infinities" if origin.has_bad_input else "its inputs are finite"
        inputs += f" ({origin.ranges})" if origin.ranges else ""
        if origin.has_constant:
            inputs = f"a value that it uses, such as a constant, is {origin.kind} already"
        why, advice = _cause(origin)
        following = f"Look at {where_to_look}: {advice}"
        verdict = (
            f"{values} first in the {part} pass of {origin.module or 'training_step'}{call} at step {reading.step} "
            f"({where})" + (f": {what}; {inputs}" if what else "")
        )
    finding = _finding(NON_FINITE, "critical", origin.module, reading, verdict, why, following)
    return replace(finding, numbers={**numbers, ORIGIN_VALUES: float(origin.count)})


def _cause(origin: Origin) -> tuple[str, str]:
    """Return the possible cause of a bad value, given its operation and inputs, and the advice."""
    is_nan = origin.kind == "NaN"
    if origin.has_constant:
        return _WHY_CONSTANT, "find where it is made, and check or replace it."
    if origin.has_bad_input:
        return (_WHY_INFINITY if is_nan else _OVERFLOWS[0]), "find where the infinities of its input are made."
    if is_nan and not origin.backward and origin.operation in _SIGNED:
        return _WHY_NEGATIVE, "keep its argument from becoming negative, such as by clamp or softplus."
    if origin.operation in _SIMPLE:
        if not is_nan:
            return f"{_OVERFLOWS[0]} {_OR_NUMBER}", _OVERFLOWS[1]
        return _WHY_NUMBER, "print the numbers that are no tensors."
    return next(((why, advice) for names, why, advice in _CAUSES if origin.operation in names), (_WHY, _NEXT))


def finding_without_origin(
    reading: Reading, batches: list[int], *, because: str, option: str, modules: list[str], rank: str = ""
) -> Finding:
    """Return the finding for a bad value whose origin is not known exactly."""
    loss, norm = reading.values
    is_forward = loss != loss or loss in (float("inf"), float("-inf"))
    what = f"the loss is {loss:g}" if is_forward else f"the loss is {loss:g} and the gradient norm is {norm:g}"
    part = "forward pass" if is_forward else "backward pass"
    where = _batches(batches, reading.epoch) + rank
    some = "" if is_forward or not modules else f"; the last parameter with a bad gradient is {modules[-1]}"
    verdict = f"{what} first at step {reading.step} ({where}): it arose in the {part}{some}"
    module = modules[-1].rpartition(".")[0] if modules and not is_forward else ""
    following = f"The module is not known, because {because}. To know it: {option}."
    finding = _finding(NON_FINITE, "critical", module, reading, verdict, _WHY, following)
    return replace(finding, numbers={"batch": float(batches[0] if batches else 0), "epoch": float(reading.epoch)})


def with_older_parameters(finding: Finding, age: int) -> Finding:
    """Return a finding extended by a note that its origin was found with the parameters of an earlier step."""
    steps = "of the step before" if age == 1 else f"of {age} steps before"
    verdict = f"{finding.verdict} (the step was run again with the parameters {steps})"
    return replace(finding, verdict=verdict, numbers={**finding.numbers, "parameters_age": float(age)})


def with_rise(finding: Finding, series: str, rise: Rise, rate: float | None) -> Finding:
    """Return a finding about a bad value extended by the rise of a series before it: the training diverged."""
    verdict = f"{_course(series, rise, rate)}; then {finding.verdict}"
    following = finding.next[:1].lower() + finding.next[1:]
    if rise.last < rise.before:
        why, following = _WHY_UNBOUNDED, f"{_NEXT_UNBOUNDED} If it still diverges, {following}"
        return replace(finding, verdict=verdict, why=why, next=following, consequences=(UNBOUNDED,))
    return replace(
        finding,
        verdict=verdict,
        why="The training diverged: the learning rate is too high, or the loss or a layer grows without bound.",
        next=f"Lower the learning rate, warm it up, or clip gradients. If it still diverges, {following}",
        numbers={**finding.numbers, ROSE: rise.last / rise.before if rise.before else math.inf},
    )


def finding_of_fall(fall: Rise, reading: Reading, rate: float | None, *, rank: str = "") -> Finding:
    """Return the finding for a loss that falls without bound."""
    where = _batches(reading.indices, reading.epoch) + rank
    verdict = f"{_course('loss', fall, rate)}, without a bound (step {reading.step}, {where})"
    finding = _finding(UNBOUNDED, "warning", "", reading, verdict, _WHY_UNBOUNDED, _NEXT_UNBOUNDED)
    usual = "above -10,000, and above -10,000 × its largest magnitude in the first 10 steps"
    return replace(finding, numbers={"first": fall.before, "last": fall.last}, usual=usual)


def _course(series: str, rise: Rise, rate: float | None) -> str:
    at = "" if rate is None else f" at learning rate {rate:.3g}"
    steps = "1 step" if rise.steps == 1 else f"{rise.steps} steps"
    verb = "rose" if rise.last > rise.before else "fell"
    return f"the {series} {verb} from {rise.before:.3g} to {rise.last:.3g} in {steps}{at}"


def finding_of_overflow(reading: Reading, *, rank: str = "") -> Finding:
    """Return the finding for finite gradients whose norm is too large for float32."""
    verdict = (
        f"the gradient norm overflows first at step {reading.step} ({_batches(reading.indices, reading.epoch)}{rank}): "
        f"the loss is {reading.values[0]:.3g}, and each gradient is finite"
    )
    why = "The training diverges: the learning rate is too high, or the loss is scaled."
    following = "Lower the learning rate, look for a factor of the loss, or clip gradients."
    finding = _finding(NON_FINITE, "critical", "", reading, verdict, why, following)
    batch = float(next(iter(reading.indices), 0))
    return replace(finding, numbers={"batch": batch, "epoch": float(reading.epoch), ROSE: math.inf})


def finding_of_spike(
    spikes: list[tuple[str, float, float]],
    reading: Reading,
    *,
    factor: float,
    is_clipped: bool = False,
    share: float = math.inf,
    highest: float = 0.0,
    is_usual: bool = False,
    rank: str = "",
    usual_rows: int = 0,
    is_early: bool = False,
) -> Finding:
    """Return the finding for a spike.

    The finding is a note if the step has less than half of the usual number of samples. A spike of the loss is a note
    if it is below half of the first losses: when the loss is close to zero, the loss of one wrong sample is thousands
    of times the usual loss. A spike of the gradient norm alone is a note in three cases:

    - Gradients are clipped.
    - The loss is low: when nearly all samples fit, a single sample makes most of the gradient.
    - The loss is usual, and no single sample makes the spike: training passes a steep region, such as the end of a
      plateau.

    Args:
        spikes: For each series with a spike: ``"loss"`` or ``"gradient norm"``, the value, and the running median
            before it.
        reading: The step.
        factor: A spike is at least this many times the median.
        is_clipped: True if the trainer clips gradients after their norm is measured.
        share: The loss of the step divided by the first losses; infinity if these are not known.
        highest: The largest gradient norm of the steps before.
        is_usual: True if the loss is not above the losses of the steps before, and no single sample makes the spike.
        rank: Same as in :func:`finding_of_origin`.
        usual_rows: The usual number of samples of a step; 0 if it is not known.
        is_early: True if the spike is among the first steps. Such a spike is only reported if a single sample makes it.
    """
    where = _batches(reading.indices, reading.epoch) + rank
    is_small = 0 < 2 * reading.rows < usual_rows
    where += f", {reading.rows} of usually {usual_rows} samples" if is_small else ""
    series, value, median = spikes[0]
    both = " and ".join(
        f"the {name} to {high:.3g}, {high / usual:.3g} × its running median" for name, high, usual in spikes
    )
    verdict = f"a spike{_AT}{reading.step} ({where}): {both}"
    why = "A batch with unusual samples or wrong labels, or an update that was too large."
    following = "Look at the samples of this batch; clip gradients, or lower the learning rate if spikes repeat."
    severity = "warning"
    is_of_gradients = all(name == "gradient norm" for name, _, _ in spikes)
    if is_clipped and is_of_gradients:
        severity, following = "note", "Clipping has limited this update; look at the samples of this batch."
    elif (share < _LOW or is_usual) and is_of_gradients and value < _FAR * max(factor * median, highest):
        severity, why = "note", _WHY_LOW if share < _LOW else _WHY_STEEP
    elif share < _LOW and not is_of_gradients:
        severity, why, following = "note", _WHY_SMALL, _NEXT_SMALL
        verdict += f"; that is {share:.2g} × the first losses"
    if is_small:
        severity, why = "note", "The mean over few samples varies more than that over many."
        following = "Use drop_last=True in the data loader, if the last batch of each epoch is this small."
    finding = _finding(SPIKE, severity, "", reading, verdict, why, following)
    numbers = {
        "ratio": value / median,
        "value": value,
        "median": median,
        "batch": float(next(iter(reading.indices), 0)),
        "epoch": float(reading.epoch),
        **({"rows": float(reading.rows)} if reading.rows else {}),
    }
    usual = f"below {factor:g} × the running median, {_RECENTLY}; the first {LEAST} steps do not count"
    if is_early:
        usual += ", unless a single sample makes the loss as large"
    return replace(finding, path=series, numbers=numbers, usual=usual)


def with_row(
    finding: Finding, name: str, what: str, value: float, without: float, about: str, others: int | None = None
) -> Finding:
    """Return a finding about a step extended by the sample that caused it, such as ``"row 4,711 of …"``.

    ``what`` is ``"loss"`` or ``"gradient norm"``; ``value`` and ``without`` are its values with and without the sample.
    If other samples are bad as well, both values are measured on ``others`` other samples instead of the whole batch.
    ``about`` compares the values of the sample with the rest of the batch.
    """
    numbers = {}
    if others is not None:
        alone, than = ("", f" ({without:.3g} for {others} others without it)") if others else ("alone ", "")
        made = f"{alone}makes the {what} {value:.3g}{than}, and so do others of the batch"
    elif math.isfinite(value) and without > 0:
        numbers["row_ratio"] = value / without
        made = f"makes the {what} {value / without:.3g} × larger"
    else:
        made = f"makes it: without it, the {what} is {without:.3g}"
    following = f"Look at {name}. " + (f"Its values are {about}. " if about else "")
    return replace(
        finding,
        verdict=f"{finding.verdict}; {name} {made}",
        next=following + finding.next,
        numbers={**finding.numbers, **numbers},
    )


def with_row_before(finding: Finding, name: str, what: str, step: int, ratio: float, about: str) -> Finding:
    """Return a finding about a diverged training extended by the sample that made the spike before it."""
    return replace(
        finding,
        verdict=f"{finding.verdict}; before that, {name} made the {what} {ratio:.3g} × larger{_AT}{step}",
        why="The training diverged after the step with this sample.",
        next=f"Look at {name}. " + (f"Its values are {about}. " if about else "") + finding.next,
        numbers={**finding.numbers, "row_ratio": ratio, "row_step": float(step)},
    )


def with_batch(finding: Finding, rows: list[int]) -> Finding:
    """Return a finding about a step extended by the rows of the data set in its batch."""
    shown = ", ".join(f"{row:,}" for row in rows[:_MOST_ROWS])
    more = f" and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    return replace(finding, next=f"{finding.next} The batch has rows {shown}{more} of the training set.")


def with_spike(finding: Finding, spike: Finding) -> Finding:
    """Return the finding about earlier spikes merged with a later spike: their number, the first, the largest.

    If ``spike.records`` is 0, ``spike`` is a larger value within the last spike. If ``spike`` is not a note, the result
    is a warning.
    """
    first, _, largest = finding.verdict.partition(_LARGEST)
    numbers, count = dict(finding.numbers), finding.records + spike.records
    if spike.numbers["ratio"] > numbers.get("largest_ratio", numbers["ratio"]):
        largest = spike.verdict.partition(_AT)[2]
        numbers |= {"largest_step": spike.first_step, "largest_ratio": spike.numbers["ratio"]}
    elif finding.is_note and not spike.is_note:
        first += f"{_WORST}{spike.verdict.partition(_AT)[2]}"
    if finding.is_note and not spike.is_note:
        finding = replace(finding, severity=spike.severity, why=spike.why, next=spike.next)
    which = "the first" if largest else f"the first and {_FARTHEST}"
    spikes = f"{count} spikes ({_COUNTED}), {which}" if count > 1 else "a spike"
    return replace(
        finding,
        verdict=f"{spikes}{_AT}{first.partition(_AT)[2]}" + (f"{_LARGEST}{largest}" if largest else ""),
        numbers=numbers,
        last_step=spike.last_step,
        records=count,
    )


def with_stay(finding: Finding, rise: Rise) -> Finding:
    """Return the finding about spikes of the loss extended by the rise that has remained after the last spike."""
    verdict = (
        f"{finding.verdict}; {rise.steps} steps after step {finding.last_step}, the loss is still {rise.last:.3g}, "
        f"{rise.last / rise.before:.3g} × as large as before it"
    )
    why = "An update was too large: the training has lost what it had learned."
    following = "Lower the learning rate, or clip gradients."
    return replace(finding, severity="warning", verdict=verdict, why=why, next=following)


def finding_of_action(
    action: str,
    step: int,
    loss: float,
    because: str,
    *,
    back: int,
    why_not: str,
    factor: float,
    is_left_out: bool,
    earlier: Finding | None,
) -> Finding:
    """Return the note about the actions of the watch. Its trace lists the steps of all actions.

    A rollback undoes the updates of ``back`` steps. ``why_not`` is the reason why their batches are not repeated.
    """
    what = {
        "skip": f"step {step} was left out",
        "rollback": f"step {step} was left out, "
        + (
            f"the state of {back} steps before was restored, and the batches since then "
            if back
            else "and the state before it was restored"
        )
        + ((f"do not come again ({why_not})" if why_not else "come again") if back else ""),
        "lower_lr": f"the learning rate was multiplied by {factor:g}{_AT}{step}"
        + (", which was left out" if is_left_out else ""),
    }[action]
    before = None if earlier is None else earlier.trace
    steps, values = ((), ()) if before is None else (before.steps, before.values)
    count = 1 if earlier is None else earlier.records + 1
    times = "" if count == 1 else f" (action {count} of this kind)"
    return Finding(
        rule=ACTED,
        severity="note",
        module="",
        path=action,
        first_step=step if earlier is None else earlier.first_step,
        last_step=step,
        records=count,
        verdict=f"{what}{times}, because of this: {because}",
        why="StepWatch(on_finding=...) asks for it.",
        next="Look at the finding that is the reason.",
        usual="no step at which the watch acts",
        numbers={"times": float(count)},
        trace=Trace("watch", "value", (*steps, step)[-_MOST_ACTIONS:], (*values, loss)[-_MOST_ACTIONS:], "loss"),
    )


def _finding(
    rule: str, severity: str, module: str, reading: Reading, verdict: str, why: str, following: str
) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,  # type: ignore[arg-type]  # one of the literals
        module=module,
        path="",
        first_step=reading.step,
        last_step=reading.step,
        records=1,
        verdict=verdict,
        why=why,
        next=following,
        usual="the loss and all gradients are finite at every step",
    )


def _batches(indices: Sequence[int], epoch: int) -> str:
    """Return the text for the batches of a step. With gradient accumulation, a step has several batches."""
    first, last = (min(indices), max(indices)) if indices else (0, 0)
    several = f"batches {first} {'and' if last == first + 1 else 'to'} {last}"
    return f"{several if last > first else f'batch {first}'} of epoch {epoch}"


def _short(line: str) -> str:
    """Shorten a path with a line number to its last two components, such as ``models/net.py:31``."""
    return "/".join(line.replace("\\", "/").split("/")[-2:])
