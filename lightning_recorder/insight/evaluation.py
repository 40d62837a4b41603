"""The rule about functions that do in an evaluation what they should do in training only."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_recorder.functions import function_of
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule

__all__ = ["RULES"]


def _drops(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    # A dropout that drops nothing returns its input, and is not recorded.
    table = evidence.validation
    for site in table.places:
        function = None if site.name in evidence.wiring.types else function_of(site.name)
        zeros = table.column(site, "zero_fraction")[0]
        if function is not None and function.kind == "dropout" and len(zeros) and (zeros > 0).all():
            verdict = f"{site.name} drops values in validation, too"
            yield rule.found(evidence, table, site, verdict, statistic="zero_fraction", zero_fraction=zeros[-1])


RULES = (
    Rule(
        name="dropout-in-evaluation",
        severity="warning",
        statistic="zero_fraction of a dropout function in validation",
        thresholds={},
        persistence=0,
        usual="a dropout in eval mode returns its input",
        why="The function is called without training=self.training, and its default is to drop values.",
        next="Write F.dropout(x, p, training=self.training), or use nn.Dropout.",
        false_alarms=(
            "Models that drop values in evaluations on purpose, to estimate how sure they are. An nn.Dropout in "
            "training mode is left out."
        ),
        examine=_drops,
        explains={"train-differs": ("any",)},
        is_lasting=True,
    ),
)
