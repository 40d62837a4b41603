"""``submit``: what is in the file, what is not, and that the other commands read it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recorder import default_recorders, open_recording
from lightning_recorder.insight.exchange import verdict_without_samples
from tests.commands.console import run

SAMPLE = 0.734375  # in one row of the data only


class Net(LightningModule):
    """A net whose loss is NaN for one row, with hyperparameters that are nobody's business."""

    pole: torch.Tensor

    def __init__(self, project: str = "tulip", address: str = "/home/someone/data", lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)
        self.register_buffer("pole", torch.tensor(SAMPLE))

    @override
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.l1_loss(self.net(batch[0] / (batch[0] - self.pole)), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a finding that names a row, of 20 steps over 5 batches."""
    rows = torch.linspace(1, 2, 20).repeat(3, 1).T.contiguous()
    rows[13] = SAMPLE
    loader = DataLoader(TensorDataset(rows, torch.ones(20, 1)), batch_size=4)
    trainer = Trainer(
        default_root_dir=tmp_path_factory.mktemp("tulips"),
        max_steps=20,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*default_recorders()],
    )
    torch.manual_seed(0)
    trainer.fit(Net(), loader)
    assert trainer.log_dir is not None
    return Path(trainer.log_dir)


def unpacked(log_dir: Path, folder: Path) -> Path:
    path = folder / "run.zip"
    assert run("submit", str(log_dir), "--output", str(path)).status == 0
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "run")
    return folder / "run"


def test_doctor_says_of_the_file_what_it_says_of_the_run(log_dir: Path, tmp_path: Path) -> None:
    """The unpacked file has the records, the graph and the findings of the run."""
    (run_,), (submitted,) = (open_recording(each).runs.values() for each in (log_dir, unpacked(log_dir, tmp_path)))
    assert submitted.recorders == run_.recorders
    assert run_.findings[0].rule == "non-finite"
    assert [(each.rule, each.verdict) for each in submitted.findings] == [
        (each.rule, verdict_without_samples(each.verdict.replace("commands/test_submit.py", "test_submit.py")))
        for each in run_.findings
    ]
    assert submitted.graph is not None
    assert run_.graph is not None
    assert submitted.graph.nodes == run_.graph.nodes
    for label in run_:
        assert submitted[label].steps == run_[label].steps


def test_no_data_no_texts_and_no_folders(log_dir: Path, tmp_path: Path) -> None:
    """The file has no tensors, no sample's values, no texts of hyperparameters and no folder; numbers stay."""
    (run_,) = open_recording(log_dir).runs.values()
    assert str(SAMPLE)[:5] in run_.findings[0].next
    files = [each for each in unpacked(log_dir, tmp_path).rglob("*") if each.is_file()]
    assert {each.suffix for each in files} == {".json", ".jsonl", ".txt"}
    text = "".join(each.read_text() for each in files)
    for private in (str(SAMPLE)[:5], "tulip", "someone", "/home", str(log_dir)):
        assert private not in text
    assert '"lr":0.1' in text
    assert '"project":"(left out)"' in text


def test_repeated_batches_are_still_seen(log_dir: Path, tmp_path: Path) -> None:
    """Checksums of batches become numbers; those of equal batches are equal."""
    lines = (unpacked(log_dir, tmp_path) / "recorder/records/activations.jsonl").read_text().splitlines()
    after = [json.loads(line)["batch"] for line in lines[1:]]
    assert after == [[number % 5] * 2 for number in range(20)]


def test_what_cannot_be_submitted(log_dir: Path, tmp_path: Path) -> None:
    """A folder without one run, a file that exists and a suffix other than .zip are errors that name the fix."""
    (tmp_path / "run.zip").touch()
    for arguments, error in (
        ([str(tmp_path)], "nothing was recorded in"),
        ([str(log_dir), "--output", str(tmp_path / "run.zip")], "exists. Name another file with --output"),
        ([str(log_dir), "--output", str(tmp_path / "run.tar")], "must end in .zip"),
    ):
        logged = run("submit", *arguments)
        assert logged.status == 2
        assert error in logged.err
