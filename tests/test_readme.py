"""Python blocks of the README that are not doctests run as printed."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

import lightning_recorder
from lightning_recorder import ActivationRecorder, GraphRecorder, Outputs, Schedule, sinks
from tests.callbacks.models import Classifier, digits

README = Path(lightning_recorder.__file__).parent.parent / "README.md"
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if not block.startswith(">>>")
]
TITLES = [re.sub(r"\W+", "-", block.strip().splitlines()[-1])[:40] for block in BLOCKS]

TRAINED, OPENED = ").fit(model, loader)", "open_recording("
quiet = partial(Trainer, max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)


def test_the_blocks_are_found() -> None:
    """The README has one block that trains and one that opens a recording."""
    assert len(BLOCKS) >= 7
    assert [sum(text in block for block in BLOCKS) for text in (TRAINED, OPENED)] == [1, 1]


@pytest.mark.parametrize("block", BLOCKS, ids=TITLES)
def test_a_block_runs_as_printed(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the reader's trainer, model and loader, every line runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks.loggers, "_SINKS", dict(getattr(sinks.loggers, "_SINKS", {})), raising=False)
    namespace: dict[str, Any] = {"Trainer": quiet, "model": Classifier(), "loader": digits(50, 2)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`max_epochs` was not set")  # by snippets that do not train
        if OPENED in block:
            recorder = ActivationRecorder(schedule=Schedule(stages=["train", "validate"]), outputs=Outputs(plots=False))
            trainer = quiet(callbacks=[recorder, GraphRecorder(formats=[])])
            trainer.fit(namespace["model"], namespace["loader"], digits(2))
        exec(compile(block, str(README), "exec"), namespace)
    if TRAINED in block:
        assert list(namespace["sink"].scalars["activations/head/rms"]) == [0, 49]
        assert namespace["dump"].tensors["head/histogram"].shape == (2048,)
    if OPENED in block:
        assert namespace["series"].steps == [0, 49]
        assert namespace["conv"].bins(49).sum() > 0
