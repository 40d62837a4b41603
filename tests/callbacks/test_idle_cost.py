"""The overhead of a recorder on steps that it does not record."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from lightning.pytorch import Callback

import lightning_recorder
from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    Outputs,
    ParameterRecorder,
    StepWatch,
    TensorDumper,
)
from tests.callbacks.models import digits, fit
from tests.callbacks.small import small

PACKAGE = str(Path(lightning_recorder.__file__).parent)
UNWATCHED = Outputs(findings=False)
BATCHES = range(20, 30)
"""The counted batches, all after the background work for the first step."""


class CallCounter(Callback):
    """Counts the calls of the package's functions in some batches. Comes first in the list of callbacks."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.train = 0
        self.validation = 0

    def count(self, batch_idx: int, kind: str) -> None:
        # The picture of the graph is drawn in the meantime and shown by the next hook.
        if batch_idx == BATCHES.start and getattr(self.recorder, "_output", None) is not None:
            self.recorder._show(None)

        def see(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                setattr(self, kind, getattr(self, kind) + 1)

        if batch_idx == BATCHES.start:
            # A collection would count the finalizers of the recorders of earlier tests.
            gc.disable()
            sys.setprofile(see)
        elif batch_idx == BATCHES.stop:
            sys.setprofile(None)
            gc.enable()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.count(batch_idx, "train")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.count(batch_idx, "validation")


@pytest.mark.parametrize(
    ("make", "train", "validation"),
    [
        (partial(ActivationRecorder, outputs=UNWATCHED), 12, 4),
        (partial(GradientRecorder, outputs=UNWATCHED), 12, 4),
        (partial(ParameterRecorder, outputs=UNWATCHED), 12, 4),
        (StepWatch, 100, 4),
        (TensorDumper, 6, 0),
        (GraphRecorder, 4, 4),
    ],
)
@pytest.mark.parametrize("logger", [False, True])
def test_a_step_that_is_not_recorded_costs_few_calls(
    make: Callable[[], Any], train: int, validation: int, logger: bool, tmp_path: Path
) -> None:
    """On an unrecorded batch, a recorder calls at most the stated number of functions."""
    recorder = make()
    counter = CallCounter(recorder)
    options = {"log_every_n_steps": 1000, "num_sanity_val_steps": 0, "logger": logger}
    model = small()
    try:
        fit(model, tmp_path, [counter, recorder], loader=digits(32), validation=digits(32), **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert counter.train <= train * len(BATCHES)
    assert counter.validation <= validation * len(BATCHES)


class Renamed(Callback):
    """Changes a setting of a recorder before the fit and reads its key in each step."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.keys: set[str] = set()
        self.is_fixed = False

    def on_train_batch_end(self, *args: Any) -> None:
        self.keys.add(self.recorder.state_key)
        self.is_fixed |= "state_key" in vars(self.recorder)


@pytest.mark.parametrize("kind", [ActivationRecorder, ParameterRecorder, GraphRecorder])
def test_the_state_key_follows_the_settings_outside_of_a_run(kind: Any, tmp_path: Path) -> None:
    """In all steps of a fit and in copies made there, the key is that of the settings at the start of the fit."""
    recorder = kind(name="first")
    before = recorder.state_key
    recorder.name = "second"
    watching = Renamed(recorder)
    fit(small(), tmp_path, [recorder, watching], logger=False)
    assert watching.is_fixed
    assert watching.keys == {kind(name="second").state_key} != {before}
    recorder.name = "first"
    assert recorder.state_key == before
