"""Values that are not finite, planted at random modules, calls, directions and steps of many nets."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer, seed_everything

from lightning_recorder import StepWatch
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


@pytest.mark.parametrize("kind", NETS)
def test_each_planted_value_is_named(kind: str, tmp_path: Path) -> None:
    """The finding names the module, the call, the direction, the kind of value, the step and the batch."""
    generator = random.Random(kind)
    counts = calls(Planted(kind))
    for _ in range(6):
        name, count = generator.choice(sorted(counts.items()))
        call, at = generator.randint(1, count), generator.randrange(BATCHES)
        value, backward = generator.choice([math.nan, math.inf]), generator.random() < 0.5
        model = Planted(kind, at)
        plant(model, name, call, value, backward=backward)
        watch = StepWatch(strict=True, incidents=False)
        fit(model, tmp_path, watch)
        assert len(watch.found) == 1, (name, call, value, backward, at)
        finding = watch.found[0]
        part = "backward" if backward else "forward"
        assert finding.module == name, (finding.verdict, name, call, value, backward)
        assert f"in the {part} pass of {name}" + (f" (call {call})" if call > 1 else "") + " at" in finding.verdict
        assert finding.first_step == at
        assert finding.numbers["batch"] == at
        assert finding.numbers["call"] == call
