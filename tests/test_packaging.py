"""The contents of the built distributions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are another package

import lightning_recorder

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "lightning_recorder"
FONTS_LICENSE = "lightning_recorder/fonts/LICENSE"
PAGE_LICENSES = "lightning_recorder/page/LICENSES"


def run(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    """Return the output of a Python command; fail with its error output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PROGRAM = """
import sys

import torch
from lightning.pytorch import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

Trainer(max_epochs=1, accelerator="cpu", logger=False).fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 2)))
print(sys.modules["lightning_recorder"].__file__)
"""

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(40, (8, 8))]
Trainer(model, TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[]), train_dataset=rows).train()
"""

LOOP = """
import torch

layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
layer(torch.ones(4, 2)).sum().backward()
optimizer.step()
"""

# An entry of None makes the import of a module an error, as if it were not installed. Lightning is imported before,
# since it imports pillow through matplotlib where that is installed.
WITHOUT = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

missing = ("PIL", "google_crc32c", "graphviz", "pygraphviz", "tensorboard")
for name in [each for each in sys.modules if each.partition(".")[0] in missing]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(missing))
import torch
import lightning_recorder

torch.manual_seed(0)
callbacks = lightning_recorder.default_recorders(every_n_train_steps=1)
options = {"max_steps": 10, "accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False}
trainer = Trainer(callbacks=callbacks, logger=CSVLogger("logs"), **options)
trainer.fit(BoringModel())
print("steps", trainer.global_step)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the working tree with the installed tools."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the installed wheel, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", target, wheel, cwd=target)
    return target


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """The wheel has sources, fonts, the type marker, the command and both licences, but neither tests nor examples."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    suffixes = (".py", ".pyi", ".c", ".typed", ".ttf", ".js", ".css", ".json")
    files = (path for path in SOURCES.rglob("*") if path.suffix in suffixes)
    # The built files of the page are in the wheel, and what they are built from is not.
    sources = {path.relative_to(ROOT).as_posix() for path in files if SOURCES / "page" / "source" not in path.parents}
    sources |= {FONTS_LICENSE, PAGE_LICENSES, "lightning_recorder.pth"}
    about = f"lightning_recorder-{lightning_recorder.__version__}.dist-info"
    licenses = ("licenses/LICENSE", f"licenses/{FONTS_LICENSE}", f"licenses/{PAGE_LICENSES}")
    described = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", *licenses)
    assert names == sources | {f"{about}/{name}" for name in described}
    assert "lightning_recorder/py.typed" in names
    description = metadata.partition("\n\n")[2]
    assert "## Five lines" in description
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", description) == []  # they would lead nowhere at PyPI
    assert "$ pip install lightning-recorder " in description  # whoever reads it there has no clone
    paths = re.findall(r" \(`([\w./-]+)`\)", description)
    assert "docs/pictures/stuck-loss-page.png" in paths
    assert [each for each in paths if not (ROOT / each).exists()] == []
    assert f"Version: {lightning_recorder.__version__}" in metadata.splitlines()
    assert wheel.name == f"lightning_recorder-{lightning_recorder.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_source_distribution_holds_the_fonts_and_their_licence(tmp_path: Path) -> None:
    """The source distribution has both fonts, byte for byte, next to their licence."""
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (path,) = tmp_path.glob("*.tar.gz")
    top = f"lightning_recorder-{lightning_recorder.__version__}"
    with tarfile.open(path) as archive:
        for name in ("LICENSE", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"):
            packed = archive.extractfile(f"{top}/lightning_recorder/fonts/{name}")
            assert packed is not None
            assert packed.read() == (SOURCES / "fonts" / name).read_bytes()


def test_the_version_is_the_same_everywhere() -> None:
    """The package, CITATION.cff and the latest release of the changelog have the same version and date."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(r"^## \[(\d.*)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert releases[0] == (lightning_recorder.__version__, str(cited["date-released"]))
    assert cited["version"] == lightning_recorder.__version__


@pytest.mark.slow
def test_compiler_pictures_and_tensorboard_can_be_missing(tmp_path: Path) -> None:
    """Without a compiler, Graphviz, pillow and TensorBoard, a run has its records and its graph, and one line each."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CC": "/nonexistent", "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["steps 10"]), done.stderr[-3000:]
    folder = tmp_path / "logs" / "lightning_logs" / "version_0" / "recorder"
    recorders = ("activations", "gradients", "parameters", "watch")
    assert all((folder / "records" / f"{each}.jsonl").stat().st_size for each in recorders)
    assert all((folder / each).exists() for each in ("findings.json", "graph.json"))
    assert done.stderr.count("graph.json, without a picture: the package graphviz is missing, `pip install") == 1
    assert done.stderr.count("writes no more plots: the package pillow is missing, `pip install pillow`") == 3
    assert done.stderr.count("/nonexistent did not build it") == 1


@pytest.mark.slow
def test_the_installed_wheel_records_any_program(installed: Path, tmp_path: Path) -> None:
    """The installed wheel, away from the sources, records a program that does not import the package."""
    (tmp_path / "train.py").write_text(PROGRAM)
    said = run("-m", "lightning_recorder", "run", "train.py", cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(said.splitlines()[-1]) == installed / "lightning_recorder" / "__init__.py"
    records = tmp_path / "recordings" / "version_0" / "recorder" / "records"
    assert sorted(path.stem for path in records.iterdir()) == ["activations", "gradients", "parameters", "watch"]


@pytest.mark.slow
def test_the_variable_alone_sees_the_trainer_of_transformers(installed: Path, tmp_path: Path) -> None:
    """Python reads the file beside the installed package, in any program, and a loop gets the lines that record it."""
    (tmp_path / "train.py").write_text(TRANSFORMERS)
    (tmp_path / "loop.py").write_text(LOOP)

    def start(program: str, **environment: str) -> str:
        code = f"import runpy, site; site.addsitedir({str(installed)!r}); runpy.run_path({program!r})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr

    start("train.py", LIGHTNING_RECORDER="on")
    records = tmp_path / "out" / "recordings" / "version_0" / "recorder" / "records"
    assert sorted(path.stem for path in records.iterdir()) == ["activations", "gradients", "parameters", "watch"]
    assert "with Monitor(model, optimizer" in start("loop.py", LIGHTNING_RECORDER="on")
    assert "nothing is checked" in start("loop.py", LIGHTNING_RECORDER="check")
    assert start("loop.py", LIGHTNING_RECORDER="off") == start("loop.py") == ""
