"""The rule about ranks whose replicated parameters drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import RANKS_DIFFER, Finding
from lightning_recorder.insight.rule import rule
from lightning_recorder.names import RUNNING_STATISTICS

WHY_ALL = (
    "The gradients of all parameters differ. Either they are not averaged: the step calls a module around the one that "
    "DDP wraps, the backward pass is inside of no_sync, or nothing reduces the gradients. Or they are changed "
    "afterwards, such as by clipping on one rank or by noise of another seed."
)
NEXT_ALL = "Compute the loss with the modules of the LightningModule itself; look for no_sync and for copies."
WHY_SOME = (
    "Something that is local to a rank can do this: clipping, a hook, another initialization, another learning rate, "
    "an optimizer step on one rank, or parameters that DDP ignores."
)
WHY_GRADIENTS = (
    "Their gradients differ, too. Either they are not averaged, as those of "
    "parameters that DDP ignores or that a loop leaves out, or something that is local to a rank changes them "
    "afterwards: clipping, a hook, or noise of another seed."
)
NEXT_SOME = "Look for code that runs on one rank or changes these gradients after they are reduced."
WHY_AFTER = (
    "The latest gradients are equal on all ranks, so something else changes the values: another initialization or "
    "checkpoint, another optimizer, a step that one rank leaves out, or code that writes to them on one rank or from "
    "its own batches."
)
WHY_LATER = (
    "The gradients are equal on all ranks when they are recorded, so something later changes the values: clipping on "
    "one rank, another optimizer or state, a step that one rank leaves out, another initialization or checkpoint, or "
    "code that writes to them on one rank."
)
NEXT_AFTER = "Look for code that runs on one rank only, and for writes to parameters outside of the optimizer."
NEXT_STEPS = "Let all ranks step or none. A GradScaler must see an overflow on all of them."
WHY_NO_SYNC = "DDP does not average the gradients: no_sync is still active after the step."
NEXT_NO_SYNC = "Leave no_sync before the last backward pass of each step."
WHY_UNKNOWN = (
    "DDP does not average their gradients: they were added to the model after DDP had wrapped it, or DDP ignores them."
)
NEXT_UNKNOWN = "Make all parameters in __init__ or configure_model, and look at _ddp_params_and_buffers_to_ignore."
NEXT_SETTINGS = (
    "Give all ranks the same settings. A scheduler needs a metric that is equal on all of them (sync_dist=True)."
)
_WHY_GRAD = "The step computes its gradients with torch.autograd.grad, which DDP does not average over the ranks."
_NEXT_GRAD = "Use manual_backward, or average the gradients with all_reduce before the optimizer step."
WHY_BUFFERS = "Each rank updates them from its own batches. Without SyncBatchNorm, this is expected."
WHY_OWN_BUFFERS = (
    "Each rank updates them on its own, or one rank alone does. DDP copies those of the first rank to all before the "
    "next forward pass, unless broadcast_buffers=False, so the updates of the others are lost."
)
NEXT_OWN_BUFFERS = "Reduce the update over the ranks, if the model uses these values."
NEXT_BUFFERS = "Use sync_batchnorm=True if the batch of one rank is small."


@rule(
    RANKS_DIFFER,
    "critical",
    statistic="bitwise equality of replicated parameters, gradients, updates and optimizer states on all ranks",
    usual="equal on all ranks in each record",
    why=WHY_ALL,
    next=NEXT_ALL,
    false_alarms="Running statistics of a normalization alone are a note. Parameters that are meant to differ, such as "
    "experts of one rank, are reported, too.",
    needs=("parameters",),
    records=1,
    is_lasting=True,
)
def ranks_differ(evidence: Evidence) -> Iterator[Finding]:
    """Yield the parameters that differ between ranks; without any, the running statistics that differ."""
    table = evidence.parameters
    since = {site: step for site, step in table.diverged.items() if site in table.places}
    buffers = [site for site in since if site.path in RUNNING_STATISTICS]
    differing = [each for each in evidence.tensors if {each.site, each.gradient.site, each.update.site} & since.keys()]
    if not differing:
        if buffers:
            buffer = min(buffers, key=lambda site: since[site])
            verdict = f"the running statistics of {buffer.name} differ between the {table.ranks} ranks"
            more = f" and those of {len(buffers) - 1} more buffers" if len(buffers) > 1 else ""
            found = View(evidence, table, buffer).found(verdict + more, since=since[buffer], buffers=len(buffers))
            yield replace(found, severity="note", why=WHY_BUFFERS, next=NEXT_BUFFERS)
        return
    first = differing[0]
    unreduced = [since[each.gradient.site] for each in differing if each.gradient.site in since]
    values = [since[each.site] for each in differing if each.site in since]
    updates = [since[each.update.site] for each in differing if each.update.site in since]
    begun = min([*values, *updates, *unreduced])
    is_all = len(differing) == len([each for each in evidence.tensors if each.gradient])
    what = f"all {len(differing)} trained parameters" if is_all else listed([each.name for each in differing])
    what = what if values else f"the gradients or updates of {what}"
    step = min(values) if values else begun
    verb = "differs" if len(differing) == 1 and values else "differ"
    verdict = f"{what} {verb} between the {table.ranks} ranks from step {step} on"
    if unreduced and values:
        verdict += f", and the gradients of {len(unreduced)} from step {min(unreduced)} on"
    earlier = [each for each in table.steps if each < begun]
    verdict += f"; all were equal at step {earlier[-1]}" if earlier else ""
    reduced = [each for each in differing if each.gradient and each.gradient.site not in since]
    counts: dict[str, Any] = {"unreduced": len(unreduced)} if unreduced else {}
    counts |= {"reduced": len(reduced)} if reduced else {}
    found = first.found(verdict, since=begun, parameters=len(differing), **counts)
    others = tuple(dict.fromkeys(each.module for each in differing if each.module != first.module))
    why, following = ("", "") if is_all and unreduced else (WHY_SOME, NEXT_SOME)
    if len(reduced) == len(differing):
        why, following = WHY_LATER, NEXT_AFTER
    elif unreduced and not is_all and len(unreduced) == len(differing):
        why, following = WHY_GRADIENTS, NEXT_SOME
    passes = {node.name for node in evidence.graph.nodes if node.kind == "backward"}
    if is_all and unreduced and passes == {"grad"}:
        why, following = _WHY_GRAD, _NEXT_GRAD
    yield replace(found, others=others, why=why, next=following)


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the other names."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more parameters" if len(names) > 3 else shown
