"""The default sample of validations, which findings compare with training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    Schedule,
    open_recording,
)

_BATCH = 8


class Net(LightningModule):
    """Two linear layers with a normalization, which may keep its running statistics from following."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=momentum)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.relu(self.norm(self.first(x))))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data(batches: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(_BATCH * batches, 6, generator=generator) + 2
    return DataLoader(TensorDataset(x, (x[:, 0] > 2).long()), batch_size=_BATCH)


def fit(folder: Path, callbacks: list[Callback], model: Net, *, epochs: int = 2, batches: int = 4) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        max_epochs=epochs,
        log_every_n_steps=5,
        **quiet,  # type: ignore[arg-type]  # flags
    )
    trainer.fit(model, data(60), data(batches))
    return trainer


def test_the_first_batch_of_a_validation_is_recorded_by_default(tmp_path: Path) -> None:
    """The record file has the first batch of the first validation after 100 steps, and loggers get nothing of it."""
    sink = MemorySink()
    recorder = ActivationRecorder(outputs=Outputs(plots=False), sinks=[sink], strict=True)
    gradients = GradientRecorder(outputs=Outputs(plots=False), strict=True)
    fit(tmp_path, [recorder, gradients], Net())
    run = open_recording(tmp_path).run
    sample = run["activations"].of("validate")
    assert (sample.steps, sample["head"].scalars(119)["count"]) == ([119], _BATCH * 3)
    assert sample.about(119)["is_sample"] is True
    assert run["gradients"].stages == ["train"]
    assert not any("validate" in tag for tag in sink.scalars)
    assert recorder.latest_of("validate") == {}


def test_more_batches_of_a_long_validation_are_recorded(tmp_path: Path) -> None:
    """The first two of 250 batches form the record."""
    fit(tmp_path, [ActivationRecorder(outputs=Outputs(plots=False), strict=True)], Net(), batches=250)
    sample = open_recording(tmp_path).run["activations"].of("validate")
    assert sample["head"].scalars(sample.steps[0])["count"] == 2 * _BATCH * 3


@pytest.mark.parametrize(
    "recorder",
    [
        ActivationRecorder(outputs=Outputs(plots=False, findings=False)),
        ActivationRecorder(schedule=Schedule(stages=["train", "validate"]), outputs=Outputs(plots=False)),
    ],
    ids=["no findings", "all batches"],
)
def test_the_sample_is_for_findings_only(recorder: ActivationRecorder, tmp_path: Path) -> None:
    """Without findings nothing of validations is recorded, and with the stage all batches are."""
    fit(tmp_path, [recorder], Net())
    series = open_recording(tmp_path).run["activations"]
    if "validate" not in recorder.stages:
        assert series.stages == ["train"]
    else:
        assert series.of("validate")["head"].scalars(119)["count"] == 4 * _BATCH * 3


def test_the_sample_changes_nothing(tmp_path: Path) -> None:
    """Parameters and buffers are bitwise those of a fit without recorders."""
    models = Net(), Net()
    fit(tmp_path / "a", [], models[0])
    fit(tmp_path / "b", [ActivationRecorder(outputs=Outputs(plots=False), strict=True)], models[1])
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name


class Masked(Net):
    """A transformer encoder that torch fuses in eval mode; its output is then NaN for a completely masked row."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.outputs = nn.TransformerEncoder(layer, 2), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x)[:, None].expand(-1, 3, -1)
        mask = (x[:, :3] > 4) | (x[:, :1] > 6)
        encoded: Tensor = self.encoder(steps, src_key_padding_mask=mask)
        return self.head(encoded.mean(1))  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.outputs.append(self(batch[0]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_fused_layers_stay_fused(tmp_path: Path) -> None:
    """Outputs of validations are bitwise those without recorders, and modules outside of the layers are recorded."""
    models = Masked(), Masked()
    fit(tmp_path / "a", [], models[0])
    fit(tmp_path / "b", [ActivationRecorder(outputs=Outputs(plots=False), strict=True)], models[1])
    assert any(each.isnan().any() for each in models[0].outputs)
    for plain, recorded in zip(models[0].outputs, models[1].outputs, strict=True):
        assert torch.equal(plain.nan_to_num(7), recorded.nan_to_num(7))
    sampled = {site.name for site in open_recording(tmp_path / "b").run["activations"].of("validate")}
    assert "head" in sampled
    assert not any(name.startswith("encoder") for name in sampled)


@pytest.mark.parametrize(("momentum", "found"), [(0.1, []), (0.0, [("train-differs", "norm")])])
def test_a_normalization_that_does_not_follow_is_found_by_default(
    momentum: float, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    """If the running statistics stay at their start, the default recorder finds that validation differs."""
    # The graph has the classes of the modules, on which the limit of the rule depends.
    recorders: list[Callback] = [
        ActivationRecorder(outputs=Outputs(plots=False), strict=True),
        GraphRecorder(formats=[]),
    ]
    fit(tmp_path, recorders, Net(momentum), epochs=3, batches=100)
    findings = open_recording(tmp_path).run.findings
    assert [(each.rule, each.module) for each in findings if each.rule == "train-differs"] == found
