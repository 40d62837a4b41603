"""Prints the findings of the corpus: precision, recall and what was missed.

``python -m tests.insight.corpus.table FOLDER [first|second|all]`` reads what ``tests.insight.corpus.runs`` wrote.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_recorder import open_recording
from lightning_recorder.insight import Finding
from tests.insight.corpus.faults import FAULTS
from tests.insight.corpus.runs import halves
from tests.insight.corpus.task import HEALTHY

__all__ = ["is_named", "main"]


def is_named(name: str, findings: Sequence[Finding]) -> bool:
    """Return True if the first finding names the culprit of a planted fault by a rule that fits."""
    fault = FAULTS[name]
    warnings = [each for each in findings if not each.is_note]
    return bool(warnings) and warnings[0].rule in fault.rules and warnings[0].module in fault.culprits


def main(folder: str, which: str = "all") -> None:
    half = {"first": 0, "second": 1}
    healthy, faulty = list(HEALTHY), list(FAULTS)
    if which in half:
        healthy, faulty = halves(healthy)[half[which]], halves(faulty)[half[which]]
    alarms = named = noticed = 0
    for name in [*healthy, *(f"fault_{each}" for each in faulty)]:
        began = time.monotonic()
        findings = open_recording(Path(folder) / name).findings
        took = time.monotonic() - began
        warnings = [each for each in findings if not each.is_note]
        fault = name.removeprefix("fault_") if name.startswith("fault_") else ""
        if fault:
            mark = "named" if is_named(fault, findings) else "noticed" if warnings else "MISSED"
            named, noticed = named + (mark == "named"), noticed + bool(warnings)
        else:
            mark = "ALARM" if warnings else "quiet"
            alarms += bool(warnings)
        print(f"{mark:8}{name} ({took:.2f} s)" + (f" {FAULTS[fault].culprits}" if fault else ""))  # noqa: T201
        if mark != "quiet":
            for each in findings[:4]:
                print(f"          {each.rule}: {each.line} [{', '.join(each.consequences)}]")  # noqa: T201
    print(f"{which}: {alarms} of {len(healthy)} healthy runs with a warning")  # noqa: T201
    print(f"{which}: {named} of {len(faulty)} faults named in the first line, {noticed} with a warning")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
