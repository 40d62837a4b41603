"""Values that are not finite, planted at random modules, calls, directions and steps of many nets."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_recorder import StepWatch
from tests.watch.late import arrive_late
from tests.watch.nets import BATCHES, NETS, Planted, batches, calls, plant

OFF: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def fit(model: Planted, folder: Path, watch: StepWatch, **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    trainer = Trainer(default_root_dir=folder, accelerator="cpu", callbacks=[watch], max_epochs=1, **{**OFF, **options})
    trainer.fit(model, batches())
    return trainer


def check(kind: str, name: str, call: int, value: float, backward: bool, at: int, folder: Path) -> None:
    """Train with a planted value, and check that the finding names it."""
    model, watch = Planted(kind, at), StepWatch(strict=True, incidents=False)
    plant(model, name, call, value, backward=backward)
    fit(model, folder, watch)
    verdicts = [each.verdict for each in watch.found]
    assert len(verdicts) == 1, (name, call, value, backward, at, verdicts)
    part, again = "backward" if backward else "forward", f" (call {call})" if call > 1 else ""
    assert f"in the {part} pass of {name}{again} at step {at} (batch {at} of epoch 0" in verdicts[0], (value, verdicts)
    finding = watch.found[0]
    assert (finding.module, finding.first_step) == (name, at)
    assert (finding.numbers["batch"], finding.numbers["call"]) == (at, call)


@pytest.mark.parametrize("kind", NETS)
def test_each_planted_value_is_named(kind: str, tmp_path: Path) -> None:
    """The finding names the module, the call, the direction, the kind of value, the step and the batch."""
    generator = random.Random(kind)
    counts = calls(Planted(kind))
    for _ in range(6):
        name, count = generator.choice(sorted(counts.items()))
        call, at = generator.randint(1, count), generator.randrange(BATCHES)
        value, backward = generator.choice([math.nan, math.inf]), generator.random() < 0.5
        check(kind, name, call, value, backward, at, tmp_path)


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("kind", NETS)
def test_each_planted_value_is_named_where_values_arrive_late(
    kind: str, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device, the copies of the parameters that are kept by default name as much."""
    arrive_late(monkeypatch, late)
    generator = random.Random(f"{kind} {late}")
    counts = calls(Planted(kind))
    for _ in range(2):
        name, count = generator.choice(sorted(counts.items()))
        call, at = generator.randint(1, count), generator.randrange(BATCHES)
        value, backward = generator.choice([math.nan, math.inf]), generator.random() < 0.5
        check(kind, name, call, value, backward, at, tmp_path)


def test_an_infinite_factor_behind_a_mask_is_named(tmp_path: Path) -> None:
    """The infinities of a mask do not hide those that a later module makes."""
    check("masked", "net.scores", 1, math.inf, False, 4, tmp_path)
