"""Tests that the files of a run hold no secrets of the program, and that the user decides who may read them."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_recorder import ActivationRecorder, Outputs, Run, StepWatch, default_recorders, open_recording
from lightning_recorder.callbacks.reproduce import make_model
from lightning_recorder.errors import RecorderError
from tests.commands.console import run as command

CANARY = "canary7"
WIDTH, BATCHES = 6, 6


class Encode(torch.autograd.Function):
    """A function whose arguments the graph shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, address: str, api_key: str) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, None, None


class Remote(nn.Linear):
    """A layer that shows an address and a key in its ``extra_repr``."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, url='https://me:{CANARY}@host', api_key='{CANARY}'"

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = Encode.apply(x, f"https://me:{CANARY}@host", f"api_key={CANARY}")  # type: ignore[no-untyped-call]
        return super().forward(encoded)


class Secretive(LightningModule):
    """A model with secrets in all that a recorder can read.

    Args:
        api_key: A secret by its name.
        address: An address with a password.
        settings: Nested settings with a secret.
        rate: The learning rate.
        logger: Let the loggers have the hyperparameters.
        fault: The batch whose loss is not finite; it cannot be run again if the hyperparameters are not logged.
    """

    def __init__(
        self,
        api_key: str = "",
        address: str = "",
        settings: dict[str, Any] | None = None,
        rate: float = 0.1,
        num_tokens: int = 3,
        logger: bool = True,
        fault: int = -1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["fault"], logger=logger)
        self.token, self.rate, self.fault = f"{CANARY}token", rate, fault
        self.batches: list[int] = []
        self.net = nn.Sequential(Remote(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.fault and batch_idx in self.batches and not self.hparams["logger"]:
            fail()
        self.batches.append(batch_idx)
        password = "canary7 in a line of code"
        loss = self.net(batch[0]).square().mean() * (float("nan") if batch_idx == self.fault else 1 + 0 * len(password))
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]  # the product has no type

    def configure_optimizers(self) -> Any:
        group = {"params": self.parameters(), "api_key": CANARY, "store": f"s3://me:{CANARY}@host/a"}
        return torch.optim.SGD([group], lr=self.rate)


def fail() -> NoReturn:
    """Fail as a client of a service does."""
    raise ConnectionError(f"401 for https://me:{CANARY}@host/?token={CANARY} with 'api_key': '{CANARY}'")


class Failing(Metric):
    """A metric that fails."""

    def update(self, value: Tensor) -> None:
        fail()

    def compute(self) -> Tensor:
        return torch.ones(())


def fit(folder: Path, kind: type[Any] = TensorBoardLogger, *, fault: int = -1, **options: Any) -> None:
    """Record a fit whose program has secrets everywhere."""
    seed_everything(1, verbose=False)
    secrets: dict[str, Any] = {"api_key": f"{CANARY}{folder.name}", "address": f"postgresql://me:{CANARY}@host/data"}
    model = Secretive(**secrets, settings={"db": {"password": CANARY}}, fault=fault, **options)
    outputs = Outputs(report=True)
    recorders = default_recorders(every_n_train_steps=2, outputs=outputs)
    extra = ActivationRecorder(every_n_train_steps=2, name="extra", extra=[Failing()], outputs=outputs)
    trainer = Trainer(
        accelerator="cpu",
        logger=kind(folder, name="", version=""),
        callbacks=[*recorders[:-1], extra, StepWatch(save_parameters=True)],
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(BATCHES * 4, WIDTH)), batch_size=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Recorded fits of one program: ``hidden`` and ``other`` do not log their hyperparameters, ``logged`` does.

    Files were made with the umask 027.
    """
    folder = tmp_path_factory.mktemp("privacy")
    before, arguments = os.umask(0o027), sys.argv
    sys.argv = [*sys.argv, f"--api-key={CANARY}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVICE_API_KEY", CANARY)
        with pytest.warns(UserWarning, match="ConnectionError"):
            fit(folder / "hidden", logger=False, fault=3)
        with pytest.warns(UserWarning, match="ConnectionError"):
            fit(folder / "other", CSVLogger, logger=False, rate=0.2)
        with pytest.warns(UserWarning, match="ConnectionError"):
            fit(folder / "logged", rate=0.3, fault=3)
        os.umask(before)
        sys.argv = arguments
        yield folder


def texts(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file, and those that are compressed in it."""
    content = path.read_bytes()
    yield content
    for blob in re.findall(rb"H4sI[A-Za-z0-9+/=]+", content):
        with contextlib.suppress(ValueError, OSError, EOFError):
            yield gzip.decompress(base64.b64decode(blob))


def test_no_file_of_a_run_has_a_secret(folder: Path) -> None:
    """No byte of the folder of a run has a secret of the program, event files and compressed data included."""
    files = [path for name in ("hidden", "other") for path in (folder / name).rglob("*") if path.is_file()]
    files += [path for path in (folder / "logged" / "recorder").rglob("*") if path.is_file()]  # loggers write the rest
    names = {path.name for path in files}
    assert names >= {"report.html", "incident.json", "graph.json", "receipt.json", "findings.json", "metrics.csv"}
    assert [str(path) for path in files if any(CANARY.encode() in text for text in texts(path))] == []


def test_what_is_sent_to_others_has_no_secret(folder: Path, tmp_path: Path) -> None:
    """The page of two runs, the view of a notebook, and the output of the commands have no secret."""
    runs = [folder / name for name in ("hidden", "other", "logged")]
    said = [command("diff", *runs[:2]), command("diff", *runs[1:], "--json"), command("diff", *runs[1:], "--all")]
    said += [command(name, runs[2]) for name in ("ls", "doctor")]
    said += [command("show", runs[2], "**", "--details"), command("graph", runs[2], "--format", "text")]
    said += [command(name, runs[2], "--json") for name in ("ls", "show", "doctor", "graph")]
    said += [command("doctor", folder, "--format", form) for form in ("sarif", "junit")]
    assert {each.status for each in said} <= {0, 1}
    assert "lr 0.1 → 0.2" in said[0].out
    assert command("view", *runs, "--output", tmp_path / "page.html").status == 0
    assert command("export", runs[2], tmp_path / "all.csv").status == 0
    (tmp_path / "notebook.html").write_text(open_recording(folder)._repr_html_())
    (tmp_path / "said.txt").write_text("".join(each.out + each.err for each in said))
    assert [path.name for path in tmp_path.iterdir() if any(CANARY.encode() in each for each in texts(path))] == []


def settings_of(run: Run) -> dict[str, Any]:
    settings: dict[str, Any] = next(iter(run["activations"].sessions)).about["settings"]
    return settings


def test_the_record_has_what_the_loggers_may_have(folder: Path) -> None:
    """Hyperparameters are recorded as the loggers get them, with their secrets hidden; otherwise there are none."""
    runs = open_recording(folder)
    assert [settings_of(runs[name])["hparams"] for name in ("hidden", "other")] == [{}, {}]
    assert settings_of(runs["logged"])["hparams"] == {
        "api_key": "(hidden)",
        "address": "postgresql://(hidden)@host/data",
        "rate": 0.3,
        "num_tokens": 3,
        "logger": True,
    }
    (group,) = settings_of(runs["logged"])["optimizers"][0]["groups"]
    assert (group["lr"], group["api_key"], group["store"]) == (0.3, "(hidden)", "s3://(hidden)@host/a")


def test_different_secrets_are_no_explanation(folder: Path) -> None:
    """Two runs whose secrets differ are not said to differ by them, even if an older version recorded the secrets."""
    (line, *rest) = (folder / "logged/recorder/records/activations.jsonl").read_text().splitlines()
    runs = [folder / "one", folder / "two"]
    for number, run in enumerate(runs):
        header = json.loads(line)
        header["settings"]["hparams"] |= {"api_key": f"{CANARY}{number}", "address": f"ftp://me:{CANARY}{number}@host"}
        (run / "recorder" / "records").mkdir(parents=True)
        text = "\n".join([json.dumps(header), *rest, ""])
        (run / "recorder" / "records" / "activations.jsonl").write_text(text)
    said = command("diff", *runs)
    assert (said.status, CANARY in said.out) == (0, False)


def test_an_incident_has_no_secret_to_make_the_model_from(folder: Path) -> None:
    """The model of an incident gets the defaults in place of secrets and of what is not logged."""
    step = "recorder/incidents/step-3"
    assert json.loads((folder / "logged" / step / "incident.json").read_text())["model"]["hparams"] == {
        "rate": 0.3,
        "num_tokens": 3,
        "logger": True,
    }
    model = make_model(folder / "logged" / step)
    assert (model.hparams["api_key"], model.hparams["rate"]) == ("", 0.3)
    about = json.loads((folder / "hidden" / step / "incident.json").read_text())
    assert about["model"]["hparams"] == {}
    about["model"]["name"] = "Demanding"
    (folder / "hidden" / step / "incident.json").write_text(json.dumps(about))
    with pytest.raises(RecorderError, match=r"'api_key'. Make it in replay\.py: secrets, and hyperparameters"):
        make_model(folder / "hidden" / step)


class Demanding(Secretive):
    """The same model, whose key has no default."""

    def __init__(self, api_key: str) -> None:
        super().__init__(api_key)


def test_files_are_readable_as_the_umask_says(folder: Path) -> None:
    """No file or folder of a run is readable by more or fewer users than any other file of the program."""
    for path in (folder / "logged" / "recorder").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path
