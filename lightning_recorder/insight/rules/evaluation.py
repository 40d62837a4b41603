"""The rule about functions that do in an evaluation what they should do in training only."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_recorder.functions import function_of
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import VALIDATION, rule


@rule(
    "dropout-in-evaluation",
    statistic="zero_fraction of a dropout function in validation",
    usual="a dropout in eval mode returns its input",
    why="The function is called without training=self.training, and its default is to drop values.",
    next="Write F.dropout(x, p, training=self.training), or use nn.Dropout.",
    false_alarms="Models that drop values in evaluations on purpose, to estimate how sure they are. An nn.Dropout in "
    "training mode is left out.",
    needs=("activations", VALIDATION),
    records=1,
    explains={"train-differs": ("any",)},
    is_lasting=True,
)
def dropout_in_evaluation(evidence: Evidence) -> Iterator[Finding]:
    # A dropout that drops nothing returns its input, and is not recorded.
    for site in evidence.validation.places:
        view = View(evidence, evidence.validation, site)
        function = None if site.name in evidence.wiring.types else function_of(site.name)
        zeros = view.zero_fraction
        if function is not None and function.kind == "dropout" and len(zeros) and (zeros > 0).all():
            yield view.found(f"{site.name} drops values in validation, too", "zero_fraction", zero_fraction=zeros[-1])
