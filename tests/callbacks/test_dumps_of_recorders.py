"""The statistics that the recorders dump, beside checkpoints and on their own schedule."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from typing_extensions import override

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    RecorderWarning,
    read_dump,
    read_manifest,
)
from lightning_recorder.callbacks.statistics import StatisticsCallback
from lightning_recorder.reductions import ChannelMoments
from lightning_recorder.statistics import SiteStatistics
from tests.callbacks.models import Classifier, digits, fit, hooks_left
from tests.disks import files_up_to

KINDS: list[type[StatisticsCallback]] = [ActivationRecorder, GradientRecorder, ParameterRecorder]


def recorder(
    kind: type[StatisticsCallback] = ActivationRecorder,
    dumps: Any = "records",
    outputs: Outputs = Outputs(),
    **options: Any,
) -> StatisticsCallback:
    """Return a recorder of the head that records each step, raises errors and draws no plots."""
    outputs = replace(outputs, dumps=dumps, plots=False)
    return kind("head", **{"every_n_train_steps": 1, "strict": True, "outputs": outputs, **options})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    (manifest,) = folder.rglob("recorder-manifest.jsonl")
    return read_manifest(manifest.parent)


def opened(folder: Path, line: dict[str, Any]) -> dict[str, Tensor]:
    (path,) = folder.rglob(line["file"])
    return read_dump(path).tensors


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this package, and ignore all others."""
    logged: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield logged
    logged += [str(each.message) for each in warned if issubclass(each.category, RecorderWarning)]


class Kept(Classifier):
    """Stores its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.logits.append(logits.detach().double())
        return logits


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_dump_has_the_statistics_of_its_record(accumulated: int, tmp_path: Path) -> None:
    """Mean, extrema, count and bins are those of all batches of the step, in one float64 pass."""
    model = Kept()
    fit(model, tmp_path, [recorder()], accumulate_grad_batches=accumulated, logger=False)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(6 // accumulated))
    for line in lines:
        first = line["step"] * accumulated
        values = torch.cat(model.logits[first : first + accumulated])
        found = opened(tmp_path, line)
        assert line["sites"] == {"head": values.numel()}
        assert int(found["head/count"]) == values.numel() == int(found["head/histogram"].sum())
        assert float(found["head/min"]) == float(values.min())
        assert float(found["head/max"]) == float(values.max())
        assert float(found["head/mean"]) == pytest.approx(float(values.mean()), abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_agrees_with_the_files(kind: type[StatisticsCallback], tmp_path: Path) -> None:
    """Each line has the names, dtypes and shapes of its file, including per-channel tensors."""
    # A bias has no per-channel mean.
    made = recorder(kind, extra=[] if kind is ParameterRecorder else [ChannelMoments()])
    made.selection = type(made.selection)(["encoder.conv1", "head"], None, None)
    fit(Classifier(), tmp_path, [made], logger=False, loader=digits(2))
    lines = lines_of(tmp_path)
    assert [(line["kind"], line["group"], line["reason"]) for line in lines] == [
        ("statistics", made.group, "record")
    ] * 2
    for line in lines:
        for name, tensor in opened(tmp_path, line).items():
            site, _, statistic = name.rpartition("/")
            assert site in line["sites"]
            logged = line["statistics"][statistic]
            assert logged["dtype"] == str(tensor.dtype).removeprefix("torch.")
            assert logged["shape"] in (list(tensor.shape), None), name


@pytest.mark.parametrize(
    ("dump", "found"),
    [
        ("records", [(step, "record") for step in range(12)]),
        ("epochs", [(5, "epoch"), (11, "epoch")]),
        (("records", "epochs"), [(step, "epoch" if step in (5, 11) else "record") for step in range(12)]),
    ],
)
def test_when_statistics_are_dumped(dump: Any, found: list[tuple[int, str]], tmp_path: Path) -> None:
    """Each record is dumped, or the latest one of each epoch with its epoch number."""
    fit(Classifier(), tmp_path, [recorder(dumps=dump)], logger=False, max_epochs=2)
    lines = lines_of(tmp_path)
    assert [(line["step"], line["reason"]) for line in lines] == found
    assert [line["epoch"] for line in lines] == [step // 6 for step, _ in found]


@pytest.mark.parametrize(("reduce", "steps"), [(2, [1, 3, 5]), ("epoch", [5])])
def test_a_record_of_several_steps_is_one_dump(reduce: Any, steps: list[int], tmp_path: Path) -> None:
    """The step of the dump is the last step of the record."""
    fit(Classifier(), tmp_path, [recorder(reduce=reduce)], logger=False)
    assert [line["step"] for line in lines_of(tmp_path)] == steps


@pytest.mark.parametrize("dump", [False, True, "records"])
def test_true_is_beside_checkpoints_and_false_nowhere(dump: Any, tmp_path: Path) -> None:
    """Files are written only to the places that ``dumps`` selects."""
    saver = ModelCheckpoint(tmp_path / "kept")
    fit(Classifier(), tmp_path, [recorder(dumps=dump), saver], logger=False, enable_checkpointing=True)
    beside = len(list((tmp_path / "kept").glob("*.safetensors")))
    apart = len(list((tmp_path / "recorder").rglob("*.safetensors")))
    assert (beside, apart) == {False: (0, 0), True: (1, 0), "records": (0, 6)}[dump]


class Burst(Callback):
    """Makes the weights of the head large in one batch."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            cast("Any", pl_module).head.weight.mul_({3: 1e6, 4: 1e-6}.get(batch_idx, 1.0))


def large(seen: SiteStatistics) -> bool:
    """The condition that the tests use."""
    return seen.abs_max > 1e4


@pytest.mark.parametrize("condition", [large, "tests.callbacks.test_dumps_of_recorders.large"])
@pytest.mark.parametrize("dump", [False, "records"])
def test_an_event_is_dumped(condition: Any, dump: Any, tmp_path: Path) -> None:
    """A record that meets the condition is dumped, and the manifest line names the site."""
    made = recorder(dumps=dump, outputs=Outputs(dump_when=condition))
    made.selection = type(made.selection)(["encoder.conv1", "head"], None, None)
    fit(Classifier(), tmp_path, [Burst(), made], logger=False)
    lines = lines_of(tmp_path)
    events = [(line["step"], line["event"]) for line in lines if line["reason"] == "event"]
    assert events == [(3, [["head", "out"]])]
    assert [line["step"] for line in lines] == ([3] if dump is False else list(range(6)))
    assert set(opened(tmp_path, lines[-1] if dump is False else lines[3])) >= {"head/max", "encoder.conv1/max"}


def test_a_condition_that_raises_is_one_warning(tmp_path: Path) -> None:
    """After a condition raises, the run and all scheduled dumps continue."""
    model = Classifier()
    with recorded_warnings() as warned:
        made = recorder(strict=False, outputs=Outputs(dump_when=lambda seen: seen.absmax))
        fit(model, tmp_path, [made], logger=False)
    (message,) = warned
    assert re.fullmatch(
        r"ActivationRecorder: dump_when raised at .*test_dumps_of_recorders\.py:\d+: AttributeError: a site has "
        r"no 'absmax': did you mean 'abs_max'\? There are count, .*shape; it is not called again, and no further dump "
        "is written because of it",
        message,
    )
    assert len(model.losses) == len(lines_of(tmp_path)) == 6


def test_the_limit_gives_one_warning(tmp_path: Path) -> None:
    """The folder never exceeds ``max_total_bytes``, and one warning names the step from which dumps stop."""
    limit = 60_000
    with recorded_warnings() as warned:
        fit(Classifier(), tmp_path, [recorder(outputs=Outputs(max_total_bytes=limit))], logger=False)
    sizes = [line["bytes"] for line in lines_of(tmp_path)]
    assert sum(sizes) <= limit < sum(sizes) + sizes[0]
    about = f"from step {len(sizes)} on: the size would exceed max_total_bytes={limit}"
    assert warned == [f"ActivationRecorder writes no more dumps {about}"]


def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    """On a full disk, dumps are left out with one warning, and records are still shown."""
    sink, model = MemorySink(), Classifier()
    with recorded_warnings() as warned, files_up_to(10_000):
        fit(model, tmp_path, [recorder(strict=False, sinks=[sink], outputs=Outputs(records=False))], logger=False)
    assert [each.partition(" to /")[0] for each in warned] == ["lightning_recorder could not write"]
    assert list(sink.scalars["activations/head/rms"]) == list(range(6))
    assert len(model.losses) == 6


def test_strict_raises_what_fails(tmp_path: Path) -> None:
    """With ``strict``, a dump that cannot be written ends the run with its error."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "dumps").write_text("in the way")
    model = Classifier()
    with pytest.raises(OSError, match="dumps"):
        fit(model, tmp_path, [recorder()], logger=False)
    assert hooks_left(model) == []


def test_an_epochs_checkpoint_in_a_second_fit_has_nothing_of_the_first(tmp_path: Path) -> None:
    """A checkpoint before the second run's first record has no dump, instead of one of the first model."""
    made = recorder(reduce="epoch", dumps=True)
    for run in ("first", "second"):
        saver = ModelCheckpoint(tmp_path / run, save_top_k=-1, every_n_train_steps=2)
        fit(Classifier(), tmp_path, [made, saver], logger=False, enable_checkpointing=True)
        assert len(list((tmp_path / run).glob("*.ckpt"))) == 3
        assert [path.name for path in (tmp_path / run).glob("epoch=0-step=2.*.safetensors")] == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
@pytest.mark.parametrize("upload", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_copy_dumps_as_the_original(
    duplicate: Callable[[Any], Any], upload: bool, after: bool, tmp_path: Path
) -> None:
    """A copy or pickle made before or after a run dumps the same as the original."""
    original: Any = recorder(dumps=("records", "checkpoints"), outputs=Outputs(dump_when=large, upload=upload))
    if after:
        fit(Classifier(), tmp_path / "first", [original])
    copied = duplicate(original)
    trainer = fit(Classifier(), tmp_path / "second", [copied])
    assert [line["step"] for line in lines_of(Path(str(trainer.log_dir)))] == list(range(6))


def test_a_run_is_not_kept(tmp_path: Path) -> None:
    """After a run, the recorder keeps neither its model, nor its trainer, nor its logger alive."""
    made = recorder(dumps=("records", "checkpoints"), outputs=Outputs(upload=True))
    model = Classifier()
    logger = TensorBoardLogger(tmp_path)
    trainer = fit(model, tmp_path, [made], logger=logger)
    left: list[weakref.ref[Any]] = [weakref.ref(model), weakref.ref(trainer), weakref.ref(logger)]
    del model, trainer, logger
    gc.collect()
    assert [each() for each in left] == [None, None, None]


def test_fast_dev_run_leaves_nothing(tmp_path: Path) -> None:
    """There is no file and no warning, since the user has nothing to fix."""
    with recorded_warnings() as warned:
        fit(Classifier(), tmp_path, [recorder(dumps=("records", "epochs"))], fast_dev_run=True)
    assert warned == []
    assert list(tmp_path.rglob("*")) == []


def test_named_recorders_have_files_of_their_own(tmp_path: Path) -> None:
    """File names contain the name of the recorder, or its number if it has no name."""
    made = [
        recorder(name="a"),
        recorder(outputs=Outputs(histograms=False)),
        ActivationRecorder("dropout", strict=True, outputs=Outputs(dumps="records")),
    ]
    fit(Classifier(), tmp_path, made, logger=False, loader=digits(1))
    assert {line["file"]: list(line["sites"]) for line in lines_of(tmp_path)} == {
        "activations-a-step=0.safetensors": ["head"],
        "activations-step=0.safetensors": ["head"],
        "activations-2-step=0.safetensors": ["dropout"],
    }


# Uploads.


def test_uploads_reach_who_keeps_files(tmp_path: Path) -> None:
    """A sink that stores files receives each dump and the table of dumps."""
    sink = MemorySink()
    fit(Classifier(), tmp_path, [recorder(sinks=[sink], outputs=Outputs(upload=True))], logger=False)
    assert list(sink.files) == [f"dumps/activations-step={step}.safetensors" for step in range(6)]
    assert list(sink.texts["recorder/activations/dumps"]) == list(range(6))


@pytest.mark.parametrize("limit", [0, 50_000])
def test_uploads_have_a_limit(limit: int, tmp_path: Path) -> None:
    """Uploads stop at the limit with one warning, and all files are still written."""
    sink = MemorySink()
    with recorded_warnings() as warned:
        made = recorder(sinks=[sink], outputs=Outputs(upload=True, max_upload_bytes=limit))
        fit(Classifier(), tmp_path, [made], logger=False)
    lines = lines_of(tmp_path)
    assert len(lines) == 6
    given = limit // lines[0]["bytes"]
    assert [line["bytes"] for line in lines[:2]] == [lines[0]["bytes"]] * 2
    assert len(sink.files) == given
    assert warned == [
        f"ActivationRecorder uploads no more dumps from step {given} on: the size would exceed max_upload_bytes={limit}"
    ]


def test_tensorboard_has_a_table(tmp_path: Path) -> None:
    """The event file of a real logger has one row per dump, not marked as uploaded."""
    trainer = fit(Classifier(), tmp_path, [recorder(every_n_train_steps=3, outputs=Outputs(upload=True))])
    accumulator = EventAccumulator(f"{trainer.log_dir}/recorder", size_guidance={"tensors": 0})
    accumulator.Reload()
    found = accumulator.Tensors("z_recorder/activations/dumps/text_summary")
    assert [event.step for event in found] == [0, 2, 5]
    rows = found[-1].tensor_proto.string_val[0].decode().splitlines()[2:]
    lines = lines_of(Path(str(trainer.log_dir)) / "recorder")
    assert rows == [
        f"| {line['step']} | `{line['file']}` | record | {len(opened(tmp_path, line))} | {line['bytes']:,} | - |"
        for line in lines
    ]


class OneThread(MemorySink):
    """A sink that must be written from the training thread."""

    any_thread = False


def test_a_sink_of_one_thread_has_the_dumps_too(tmp_path: Path) -> None:
    """Dumps written in the background are uploaded from the training thread."""
    sink = OneThread()
    fit(Classifier(), tmp_path, [recorder(sinks=[sink], outputs=Outputs(upload=True))], logger=False)
    assert list(sink.files) == [f"dumps/activations-step={step}.safetensors" for step in range(6)]
