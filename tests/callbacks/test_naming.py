"""Names of the recorders of a trainer: errors for conflicts, and labels of files and tags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    Schedule,
    TensorDumper,
    open_recording,
)
from lightning_recorder.callbacks.labels import labels
from tests.callbacks.models import Classifier, digits, events, fit

KINDS: list[Any] = [ActivationRecorder, GradientRecorder, ParameterRecorder, GraphRecorder, TensorDumper]


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_instead_of_an_instance(kind: Any, tmp_path: Path) -> None:
    """The error names the class and the fix, and no reference to the model stays on the class."""
    message = rf"callbacks contains the class {kind.__name__} instead of an instance: write {kind.__name__}\(\)"
    with pytest.raises(ArgumentError, match=message):
        fit(Classifier(), tmp_path, [kind], logger=False)
    assert not {"log", "log_dict"} & vars(kind).keys()
    with pytest.raises(ArgumentError, match=message):
        Trainer(callbacks=[kind], logger=False, accelerator="cpu").validate(Classifier(), digits(1))


EQUAL: dict[str, tuple[Callable[[], list[Callback]], str]] = {
    "equal": (
        lambda: [ActivationRecorder(), ActivationRecorder()],
        r"callbacks contains two equal ActivationRecorder: give one of them a name, as .*\(name='second'\)",
    ),
    "equal parameters": (
        lambda: [ParameterRecorder("head"), ParameterRecorder("head")],
        r"two equal ParameterRecorder: .*ParameterRecorder\(name='second'\)",
    ),
    "two graphs": (
        lambda: [GraphRecorder(), GraphRecorder(depth=1)],
        "two GraphRecorder have the name 'graph': give each of them its own name=",
    ),
    "equal names": (
        lambda: [ActivationRecorder("head", name="a"), ActivationRecorder("dropout", name="a")],
        "two ActivationRecorder have the name 'a': give each of them its own name=",
    ),
    "equal names of dumpers": (
        lambda: [TensorDumper("head", name="a"), TensorDumper("dropout", name="a")],
        "two TensorDumper have the name 'a'",
    ),
    "upper case": (
        lambda: [GradientRecorder("head", name="Slow"), GradientRecorder("dropout", name="slow")],
        "two GradientRecorder have the names 'Slow' and 'slow', which are the same on some file systems",
    ),
    "another composition": (
        lambda: [TensorDumper(name="caf\u00e9"), TensorDumper(name="cafe\u0301")],
        "which are the same on some file systems",
    ),
    "tags of an evaluation": (
        lambda: [
            ActivationRecorder("head", name="x", schedule=Schedule(stages="validate")),
            ActivationRecorder("head", name="x_validate"),
        ],
        "two ActivationRecorder have the names 'x' and 'x_validate', and tags of 'x' begin with 'x_validate' as well",
    ),
    "one module": (
        lambda: [ActivationRecorder("head"), ActivationRecorder("*", every_n_train_steps=1)],
        r"two ActivationRecorder without a name record 'head' under the same tags: .*, or select other modules",
    ),
    "a subclass": (
        lambda: [ActivationRecorder("encoder.*"), Ours("encoder.*")],
        "record 'encoder.conv1' and 3 more modules under the same tags",
    ),
}


class Ours(ActivationRecorder):
    """A user's subclass with the tags of its base."""


@pytest.mark.parametrize("case", EQUAL)
def test_recorders_that_would_write_the_same_are_refused(case: str, tmp_path: Path) -> None:
    """Before the first step, an error names the conflicting recorders and the argument that fixes it."""
    make, message = EQUAL[case]
    model = Classifier()
    with pytest.raises(ArgumentError, match=message):
        fit(model, tmp_path, make(), logger=False)
    assert model.losses == []


def test_one_object_twice(tmp_path: Path) -> None:
    """The same object in the list twice is an error."""
    recorder = TensorDumper()
    with pytest.raises(ArgumentError, match="callbacks contains the same TensorDumper twice: remove one of them"):
        fit(Classifier(), tmp_path, [recorder, recorder], logger=False)


def test_names_that_other_files_have() -> None:
    """A graph cannot have the name of the receipt, nor a dumper that of another process's files."""
    with pytest.raises(ArgumentError, match=r"name must not be 'Receipt': the other recorders write receipt\.json"):
        GraphRecorder(name="Receipt")
    with pytest.raises(ArgumentError, match="name must not end like a rank, such as 'rank1'"):
        TensorDumper(name="slow-rank1")


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder, ParameterRecorder])
def test_two_without_a_name_write_nothing_twice(kind: Any, tmp_path: Path) -> None:
    """Two disjoint selections have different tags and names for pictures, texts and files."""
    sinks = MemorySink(), MemorySink()
    options: dict[str, Any] = {"every_n_train_steps": 1, "outputs": Outputs(dumps=["records", "checkpoints"])}
    recorders = [
        kind("encoder.conv1", sinks=[sinks[0]], **options),
        kind("head", sinks=[sinks[1]], **options),
    ]
    logger = TensorBoardLogger(tmp_path)
    trainer = fit(Classifier(), tmp_path, recorders, logger=logger, enable_checkpointing=True)
    for what in ("scalars", "histograms", "images", "texts"):
        assert not getattr(sinks[0], what).keys() & getattr(sinks[1], what).keys(), what
    group = kind.group
    assert {tag.split("/")[0] for tag in sinks[1].images} <= {f"{group}-2_plots", f"{group}-2_grad_plots"}
    assert {tag.split("/")[0] for tag in sinks[1].scalars} == {group}
    pictures = sinks[0].images.keys() | sinks[1].images.keys()
    assert set(events(trainer).Tags()["images"]) == {f"z_recorder/{tag}" for tag in pictures}
    folder = Path(str(trainer.log_dir)) / "recorder"
    assert sorted(path.stem for path in (folder / "records").iterdir()) == [group, f"{group}-2", "watch"]
    assert sorted(json.loads((folder / "receipt.json").read_text())) == [group, f"{group}-2"]
    assert len(list((folder / "dumps").glob("*.safetensors"))) == 12
    assert len(list((folder.parent / "checkpoints").glob("*.safetensors"))) == 2


def sites_by_label(folder: Path) -> dict[str, set[str]]:
    """Return the modules in each record file of a run without a logger."""
    run = open_recording(folder).run
    return {label: {site.name for site in run[label].sites} for label in run.recorders}


def test_a_name_that_looks_like_a_number(tmp_path: Path) -> None:
    """``name="2"`` and a second recorder without a name have different files."""
    recorders = [
        ActivationRecorder("head"),
        ActivationRecorder("dropout"),
        ActivationRecorder("encoder.*", name="2", functions=False),
    ]
    fit(Classifier(), tmp_path, recorders, logger=False)
    assert sites_by_label(tmp_path) == {
        "activations": {"head"},
        "activations-3": {"dropout"},
        "activations-2": {"encoder.conv1", "encoder.conv2", "encoder.norm", "encoder.relu"},
        "watch": {"loss", "grad_norm"},
    }


def test_labels_are_unique_for_names_that_file_systems_confuse() -> None:
    """A number is free only if no name uses it, in any case."""
    assert labels("tensors", ["", "", "2"]) == ["tensors", "tensors-3", "tensors-2"]
    assert labels("tensors", ["", ""], ["tensors-2", "tensors-2"]) == ["tensors-2", "tensors"]


def test_labels_are_stable_after_a_resume(tmp_path: Path) -> None:
    """Recorders in a different order, or after a new one, continue in their own files."""
    first = [ActivationRecorder("head"), ActivationRecorder("dropout")]
    trainer = fit(Classifier(), tmp_path, first, logger=False)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    torch.manual_seed(0)
    again = [ActivationRecorder("dropout"), ActivationRecorder("head")]
    longer = Trainer(
        max_epochs=2,
        default_root_dir=tmp_path,
        accelerator="cpu",
        callbacks=list(again),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    longer.fit(Classifier(), digits(), ckpt_path=path)
    assert sites_by_label(tmp_path) == {
        "activations": {"head"},
        "activations-2": {"dropout"},
        "watch": {"loss", "grad_norm"},
    }
    assert [recorder.label(longer) for recorder in again] == ["activations-2", "activations"]
