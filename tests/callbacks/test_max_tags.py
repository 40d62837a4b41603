"""The modules of a large model that the loggers show."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    open_recording,
)
from tests.callbacks.models import events
from tests.sinks.test_tensorboard import layouts

DEPTH = 300
SICK, SICK_STEP = 151, 3
BATCHES = 4


class Deep(LightningModule):
    """Many small layers with skip connections, so that one with a zero output hardly changes the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(DEPTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = x + layer(x) / DEPTH
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class GoBad(Callback):
    """Makes the output of one layer zero from a step on."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SICK_STEP:
            with torch.no_grad():
                for parameter in pl_module.get_submodule(f"layers.{SICK}").parameters():
                    parameter.zero_()


def fit(folder: Path, callbacks: list[Callback], **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    model, data = Deep(), torch.randn(BATCHES * 8, 2, generator=torch.Generator().manual_seed(1))
    ckpt = options.pop("ckpt_path", None)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=8), ckpt_path=ckpt)
    return trainer


def shown(scalars: dict[str, dict[int, float]], step: int) -> dict[str, set[str]]:
    """Return the tags of each module that have a value at a step, without the name of the module."""
    found: dict[str, set[str]] = defaultdict(set)
    for tag, by_step in scalars.items():
        if step in by_step and not tag.startswith("recorder/"):
            _, name, rest = tag.split("/", 2)
            found[name].add(rest)
    return found


@pytest.mark.slow
def test_whole_modules_are_shown_and_one_that_goes_bad_joins_them(tmp_path: Path) -> None:
    """Each shown module has all its tags, also in the plots, and a layer that dies later is added."""
    sink = MemorySink()
    recorder = ParameterRecorder(sinks=[sink], strict=True, outputs=Outputs(curves="all", max_tags=1500, plots=False))
    with pytest.warns(
        RecorderWarning, match=r"ParameterRecorder shows \d+ of 300 modules .*more than max_tags=1500 tags"
    ) as warned:
        trainer = fit(tmp_path, [GoBad(), recorder])
    assert len([each for each in warned if each.category is RecorderWarning]) == 1
    by_step = [shown(sink.scalars, step) for step in range(BATCHES)]
    for found in by_step:
        assert len({frozenset(tags) for tags in found.values()}) == 1
        assert {"weight/rms", "weight/update_ratio", "weight.grad/rms", "bias.grad/rms", "bias.exp_avg/rms"} <= found[
            "layers.0"
        ]
    sick = f"layers.{SICK}"
    assert [sick in found for found in by_step] == [False] * SICK_STEP + [True]
    assert by_step[3].keys() == by_step[0].keys() | {sick}
    places = [int(name.rpartition(".")[2]) for name in by_step[0]]
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 2 * DEPTH / len(
        places
    )  # some layers of so few values are unusual, and the others evenly spread
    assert 0.7 * 1500 < sum(map(len, by_step[3].values())) + len(sink.histograms) <= 1500
    assert len(open_recording(tmp_path)["parameters"].values("rms")[0]) == 10 * DEPTH

    tags = events(trainer).Tags()["scalars"]
    charts = layouts(Path(str(trainer.log_dir), "recorder"))[-1]["parameters"]
    for title, patterns in charts.items():
        lines = [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
        assert len(lines) == 6, title
        assert sick in {tag.split("/")[2] for tag in lines}, title


@pytest.mark.slow
def test_a_resumed_run_shows_the_same_modules(tmp_path: Path) -> None:
    """A resumed run shows the same modules as an uninterrupted one, without another warning."""

    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=BATCHES)

    def recorder() -> tuple[MemorySink, ActivationRecorder]:
        sink = MemorySink()
        return sink, ActivationRecorder(
            sinks=[sink], strict=True, outputs=Outputs(curves="all", max_tags=700, plots=False)
        )

    sink, whole = recorder()
    with pytest.warns(RecorderWarning, match="of 300 modules"):
        fit(tmp_path, [GoBad(), whole, keep()], max_epochs=2, enable_checkpointing=True, logger=False)
    (first, _) = sorted((tmp_path / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    again, resumed = recorder()
    fit(tmp_path, [resumed, keep()], max_epochs=2, enable_checkpointing=True, logger=False, ckpt_path=first)
    for step in range(BATCHES, 2 * BATCHES):
        assert f"layers.{SICK}" in shown(again.scalars, step)
        assert shown(again.scalars, step) == shown(sink.scalars, step)
