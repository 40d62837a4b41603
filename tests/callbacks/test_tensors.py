"""The inputs and outputs of modules, their gradients, and reductions of the user, recorded in fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_recorder import (
    ActivationRecorder,
    BackwardInput,
    BackwardOutput,
    ForwardOutput,
    ForwardPre,
    GradientRecorder,
    MemorySink,
    Outputs,
    Schedule,
    open_recording,
    read_dump,
)
from lightning_recorder.callbacks.tensors import TensorsCallback
from lightning_recorder.reductions import ChannelMoments, Norms
from lightning_recorder.taps import Site
from lightning_recorder.tensors import Recorder
from tests.callbacks.models import Classifier, digits, fit
from tests.callbacks.small import BATCHES, go, small, warnings_by

# The resumed run does not have the callback that saves the checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")

QUIET: dict[str, Any] = {"every_n_train_steps": 1, "strict": True}
UNDRAWN: dict[str, Any] = {
    **QUIET,
    "outputs": Outputs(curves="all", plots=False),
}  # pictures take most of the time of a short fit


class Mixed(nn.Module):
    """Takes nested and keyword arguments, some of them integers, and returns a dictionary."""

    def forward(self, pair: dict[str, Any], *, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"sum": pair["a"][0] + pair["a"][1], "kept": ids if mask is None else ids * mask}


class Nested(Classifier):
    """Calls a module with nested arguments, and an activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()  # type: ignore[assignment]  # another module
        self.mixed, self.act = Mixed(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.encoder(x) - 0.5)
        ids = torch.arange(6).view(2, 3)
        found = self.mixed({"a": (hidden, 2 * hidden)}, ids=ids, mask=torch.ones(2, 3, dtype=torch.bool))
        logits: Tensor = self.head(self.act(found["sum"]))
        return logits


def tags(sink: MemorySink, statistic: str = "rms") -> list[str]:
    return sorted(tag.removesuffix(f"/{statistic}") for tag in sink.scalars if tag.endswith(f"/{statistic}"))


def test_inputs_have_tags_by_their_place_in_the_call(tmp_path: Path) -> None:
    """Each positional, keyword and nested input has its own tags; integers are recorded as well."""
    sink = MemorySink()
    recorder = ActivationRecorder(["mixed", "head"], tensors=["outputs", "inputs"], sinks=[sink], **UNDRAWN)
    fit(Nested(), tmp_path, [recorder], logger=False)
    assert tags(sink) == [
        "activations/head",
        "activations/head/in[0]",
        "activations/mixed/in.ids",
        "activations/mixed/in.mask",
        "activations/mixed/in[0].a[0]",
        "activations/mixed/in[0].a[1]",
        "activations/mixed/out.kept",
        "activations/mixed/out.sum",
    ]
    assert sink.scalars["activations/mixed/in.ids/mean"][0] == 2.5
    doubled, single = (recorder.latest[Site("mixed", f"in[0].a[{place}]")].scalars["rms"] for place in (1, 0))
    assert doubled == pytest.approx(2 * single)


def test_gradients_of_inputs_flow_through_the_module(tmp_path: Path) -> None:
    """An input has the gradient of its use in the module alone, and an integer has none."""
    sink = MemorySink()
    recorder = GradientRecorder(["mixed", "head"], tensors="inputs", sinks=[sink], **UNDRAWN)
    fit(Nested(), tmp_path, [recorder], logger=False)
    assert tags(sink) == ["gradients/head/in[0]", "gradients/mixed/in[0].a[0]", "gradients/mixed/in[0].a[1]"]
    one, other = (recorder.latest[Site("mixed", f"in[0].a[{place}]")].scalars for place in (0, 1))
    assert one == other


@pytest.mark.parametrize("kind", [ActivationRecorder, GradientRecorder])
def test_by_default_only_outputs_are_recorded(kind: type[TensorsCallback], tmp_path: Path) -> None:
    """Without ``tensors``, the tags are those of the outputs, and all calls are merged."""
    sink = MemorySink()
    fit(Nested(), tmp_path, [kind(["head", "act"], sinks=[sink], **UNDRAWN)], logger=False)
    assert tags(sink) == [f"{kind.group}/act", f"{kind.group}/head"]


def test_an_input_that_an_inplace_module_changes_is_recorded_before(tmp_path: Path) -> None:
    """Inputs are read before the call, so an in-place activation has inputs below zero and outputs without."""
    recorder = ActivationRecorder("encoder.relu", tensors=["inputs", "outputs"], **UNDRAWN)
    fit(Classifier(), tmp_path, [recorder], logger=False)
    before, after = (recorder.latest[Site("encoder.relu", path)].scalars for path in ("in[0]", "out"))
    assert before["min"] < 0 == after["min"]
    assert before["max"] == after["max"]


def test_two_recorders_may_share_a_module_if_one_records_its_inputs(tmp_path: Path) -> None:
    """A recorder of inputs and a recorder of outputs of the same module have different tags."""
    both: list[Callback] = [ActivationRecorder("head", tensors=each, **UNDRAWN) for each in ("inputs", "outputs")]
    fit(Classifier(), tmp_path, both, logger=False)
    assert [list(each.latest) for each in both if isinstance(each, ActivationRecorder)] == [
        [Site("head", "in[0]")],
        [Site("head", "out")],
    ]


def test_the_receipt_says_why_an_input_has_no_gradient(tmp_path: Path) -> None:
    """The first module, whose input is the batch, is missing in a recording of the gradients of inputs."""
    sink = MemorySink()
    recorder = GradientRecorder(["encoder.conv1", "head"], tensors="inputs", sinks=[sink], **UNDRAWN)
    fit(Classifier(), tmp_path, [recorder], logger=False)
    (by_step,) = sink.texts.values()
    text = by_step[0]
    assert "| `encoder.conv1` | no gradient: its input does not require one |" in text


# Calls.


def test_calls_of_a_module_are_kept_apart_on_request(tmp_path: Path) -> None:
    """With ``per_call``, the second call in a batch has its own tags, with the values of that call alone."""
    sink = MemorySink()
    options: dict[str, Any] = {"tensors": ["inputs", "outputs"], "per_call": True, "sinks": [sink], **UNDRAWN}
    recorders: list[Callback] = [ActivationRecorder("act", **options), GradientRecorder("act", **options)]
    seen: list[tuple[float, float]] = []
    model = Nested()
    model.act.register_forward_hook(lambda _, args, out: seen.append((args[0].max().item(), out.max().item())))
    fit(model, tmp_path, recorders, logger=False, accumulate_grad_batches=2)
    sites = ("act", "act/in[0]", "act#2", "act#2/in[0]")
    assert set(tags(sink)) == {f"{group}/{site}" for group in ("activations", "gradients") for site in sites}
    for number, site in ((0, "act"), (1, "act#2")):
        by_step = zip(seen[number::4], seen[number + 2 :: 4], strict=True)
        expected = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in by_step]
        inputs, outputs = (sink.scalars[f"activations/{site}{path}/max"] for path in ("/in[0]", ""))
        assert list(zip(inputs.values(), outputs.values(), strict=True)) == expected


def test_gradients_have_the_numbers_of_the_activations(tmp_path: Path) -> None:
    """The gradients of the calls after one without autograd have the paths of the activations of the same calls."""

    class Target(Nested):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                super().forward(x)
            return super().forward(x)

    recorders = [kind("act", per_call=True, **UNDRAWN) for kind in (ActivationRecorder, GradientRecorder)]
    fit(Target(), tmp_path, recorders, logger=False)
    activations, gradients = ([site.path for site in recorder.latest] for recorder in recorders)
    assert activations == ["out", "out#2", "out#3", "out#4"]
    assert sorted(gradients) == ["out#3", "out#4"]


class Penalized(Nested):
    """Computes gradients within the step that change neither the loss nor its gradients."""

    def __init__(self, penalty: str, way: str) -> None:
        super().__init__()
        self.penalty, self.way = penalty, way
        self.automatic_optimization = way == "automatic"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        images = batch[0].requires_grad_()
        logits = self(images)
        loss = F.cross_entropy(logits, batch[1])
        if self.penalty:
            wanted: list[Tensor] = [images] if self.penalty == "input" else list(self.parameters())
            (first, *_) = torch.autograd.grad(logits.square().sum(), wanted, create_graph=True, allow_unused=True)
            loss = loss + 0 * first.sum()
        if self.way == "automatic":
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward() if self.way == "own" else self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.parametrize("penalty", ["input", "weights"])
@pytest.mark.parametrize("way", ["automatic", "accumulated", "manual", "own"])
def test_gradients_of_a_penalty_are_not_those_of_the_loss(way: str, penalty: str, tmp_path: Path) -> None:
    """Gradients that a step computes with torch.autograd.grad are left out, however the loss is differentiated."""
    options = {"accumulate_grad_batches": 3} if way == "accumulated" else {}
    found = []
    for kind in ("", penalty):
        sink = MemorySink()
        torch.manual_seed(0)
        model = Penalized(kind, "automatic" if way == "accumulated" else way)
        recorder = GradientRecorder(tensors=["inputs", "outputs"], sinks=[sink], **UNDRAWN)
        fit(model, tmp_path / kind, [recorder], logger=False, **options)
        # The mean before a normalization is rounding noise.
        found.append({tag: values for tag, values in sink.scalars.items() if tag.endswith(("/rms", "/min", "/max"))})
    assert found[0]
    assert found[1].keys() == found[0].keys()
    for tag, values in found[0].items():
        assert found[1][tag] == pytest.approx(values, rel=1e-5, abs=1e-9), tag


def test_merged_calls_are_the_sum_of_the_calls_kept_apart(tmp_path: Path) -> None:
    """The count, the extrema and the number of zeros of all calls are those of the calls together."""
    merged, apart = ActivationRecorder("act", **UNDRAWN), ActivationRecorder("act", name="b", per_call=True, **UNDRAWN)
    fit(Nested(), tmp_path, [merged, apart], logger=False)
    (whole,) = (seen.scalars for seen in merged.latest.values())
    parts = [seen.scalars for seen in apart.latest.values()]
    assert [site.path for site in apart.latest] == ["out", "out#2"]
    assert whole["count"] == sum(part["count"] for part in parts)
    assert whole["max"] == max(part["max"] for part in parts)


def test_a_record_has_the_number_and_the_order_of_the_calls(tmp_path: Path) -> None:
    """Each record contains the number of calls of each site, in the order of the first call in that record."""

    class Swapping(Nested):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Softsign()  # type: ignore[assignment]  # another module

        def forward(self, x: Tensor) -> Tensor:
            if self.global_step == 2:
                self.dropout(x)
            logits: Tensor = self.dropout(super().forward(x))
            return logits

    recorders: list[Callback] = [
        kind(["act", "head", "dropout"], **UNDRAWN) for kind in (ActivationRecorder, GradientRecorder)
    ]
    fit(Swapping(), tmp_path, recorders, logger=False, loader=digits(3))
    run = open_recording(tmp_path).run
    for label in ("activations", "gradients"):
        calls = run[label].calls(0)
        assert {site.name: number for site, number in calls.items()} == {"act": 2, "head": 1, "dropout": 1}
        assert [site.name for site in calls] == ["act", "head", "dropout"]
    assert [site.name for site in run["activations"].calls(2)] == ["dropout", "act", "head"]
    assert run["activations"]["dropout"].calls == [1, 1, 2]


@pytest.mark.parametrize("reduce", [4, "epoch"])
def test_the_number_of_calls_survives_an_interruption(reduce: Any, tmp_path: Path) -> None:
    """A resumed record has the number of calls of the whole record."""
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"reduce": reduce, **UNDRAWN}
    go(tmp_path / "a", [ActivationRecorder("head", **options), checkpoint], enable_checkpointing=True, max_epochs=1)
    go(tmp_path / "b", [ActivationRecorder("head", **options)], ckpt=tmp_path / "step=2.ckpt", max_epochs=1)
    series = open_recording(tmp_path / "b").run["activations"]
    assert series["head"].calls == [BATCHES]


# Reductions of the user.


def rows(total: Tensor, new: Tensor) -> Tensor:
    """Sum the rows of all batches."""
    return total.sum(0, keepdim=True) + new.sum(0, keepdim=True)


BELOW: dict[tuple[str, str], type[Recorder]] = {
    ("activations", "inputs"): ForwardPre,
    ("activations", "outputs"): ForwardOutput,
    ("gradients", "inputs"): BackwardInput,
    ("gradients", "outputs"): BackwardOutput,
}
REDUCTIONS: dict[str, Callable[[], Any]] = {
    "maximum": lambda: torch.maximum,
    "rows": lambda: rows,
    "mean_metric": torchmetrics.MeanMetric,
    "cat_metric": torchmetrics.CatMetric,
    "norms": Norms,
    "channels": lambda: ChannelMoments(-1),
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
}


class Below(Callback):
    """Records the same tensors with the recorders for plain loops, and compares each record with their data.

    Args:
        recorders: The recorders of the fit, which come before it in the list of callbacks.
        reduction: A function that returns the reduction.
    """

    def __init__(self, recorders: list[TensorsCallback], reduction: Callable[[], Any]) -> None:
        self.recorders, self.reduction = recorders, reduction
        self.compared = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.below = {
            (recorder.group, tensors): BELOW[recorder.group, tensors](reduction=self.reduction()).select(
                pl_module, "head"
            )
            for recorder in self.recorders
            for tensors in recorder.tensors
        }

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        for (group, tensors), below in self.below.items():
            recorder = next(each for each in self.recorders if each.group == group)
            seen = recorder.latest[Site("head", "in[0]" if tensors == "inputs" else "out")]
            factor = trainer.accumulate_grad_batches if group == "gradients" else 1
            data = below["head"]
            named = data if isinstance(data, dict) else {recorder.options["extra"][0].name: data}
            for name, value in named.items():
                found = seen.scalars[name] if name in seen.scalars else seen.tensors[name]
                assert torch.equal(
                    torch.as_tensor(found, dtype=torch.float64),
                    factor * value.double().cpu().squeeze() if value.numel() == 1 else factor * value.double(),
                )
                self.compared += 1
            below.reset()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for below in self.below.values():
            below.detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning")
def test_results_equal_those_of_the_recorders_for_plain_loops(reduction: str, mode: str, tmp_path: Path) -> None:
    """Each result of each tensor is bitwise that of the recorder below, up to the scale of accumulated losses."""
    options: dict[str, Any] = {"tensors": ["inputs", "outputs"], "extra": REDUCTIONS[reduction](), **UNDRAWN}
    recorders: list[TensorsCallback] = [ActivationRecorder("head", **options), GradientRecorder("head", **options)]
    below = Below(recorders, REDUCTIONS[reduction])
    fit(small(), tmp_path, [*recorders, below], logger=False, **MODES[mode])
    assert below.compared >= 4 * 3


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_results_survive_an_interruption(reduction: str, tmp_path: Path) -> None:
    """A run that resumes in the middle of a record has bitwise the results of one that was not interrupted."""
    found = []
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    for folder, more, ckpt in (("whole", [checkpoint], None), ("resumed", [], tmp_path / "step=2.ckpt")):
        options: dict[str, Any] = {"reduce": "epoch", "tensors": ["inputs", "outputs"], **UNDRAWN}
        recorders = [
            kind("head", extra=REDUCTIONS[reduction](), **options) for kind in (ActivationRecorder, GradientRecorder)
        ]
        go(tmp_path / folder, [*recorders, *more], ckpt=ckpt, enable_checkpointing=bool(more), max_epochs=1)
        found.append([{**seen.scalars, **seen.tensors} for each in recorders for seen in each.latest.values()])
    for whole, resumed in zip(*found, strict=True):
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed[name])), name


def test_a_number_is_a_scalar_and_a_vector_is_in_records_pictures_and_dumps(tmp_path: Path) -> None:
    """Results reach the scalars, the records, the pictures within ``max_images``, and the dumps, by their shape."""
    sink = MemorySink()
    extra = {"total": lambda total, new: total.sum() + new.sum(), "channels": lambda _, new: new.mean(0), "last": last}
    outputs = Outputs(max_images=6, dumps="records")
    recorder = ActivationRecorder("head", extra=extra, outputs=outputs, sinks=[sink], reduce=2, **QUIET)
    fit(small(), tmp_path, [recorder], logger=False)
    seen = recorder.latest[Site("head", "out")]
    assert sink.scalars["activations/head/total"][5] == seen.scalars["total"]
    assert {name: tuple(each.shape) for name, each in seen.tensors.items()} == {"channels": (10,), "last": (8, 10)}
    series = open_recording(tmp_path).run["activations"]["head"]
    assert list(series.vectors(5)) == ["channels"]
    assert torch.equal(series.vectors(5)["channels"], seen.tensors["channels"])
    assert "vectors" not in series.series.about(5)
    pictures = {tag for tag in sink.images if tag.endswith("/head") and "over_time" not in tag}
    assert pictures == {"activations_plots/channels/head", "activations_plots/last/head"}
    dump = read_dump(next(tmp_path.rglob("*step=5.safetensors"))).tensors
    assert torch.equal(dump["head/last"], seen.tensors["last"])


def last(total: Tensor, new: Tensor) -> Tensor:
    """Return the latest batch."""
    return new


@pytest.mark.parametrize(("max_images", "expected"), [(0, 0), (1, 1), (3, 3), (12, 12)])
def test_pictures_of_results_are_limited(max_images: int, expected: int, tmp_path: Path) -> None:
    """At most ``max_images`` pictures of results are drawn, for evenly spaced sites."""
    sink = MemorySink()
    outputs = Outputs(max_images=max_images)
    fit(Classifier(), tmp_path, [ActivationRecorder(extra=ChannelMoments(), outputs=outputs, sinks=[sink], **QUIET)])
    assert len([tag for tag in sink.images if "/channel_" in tag]) == expected


def test_a_reduction_that_fails_is_left_out_at_its_site(tmp_path: Path) -> None:
    """A function that raises for a shape causes one warning, and works at the other sites."""

    def strictly(total: Tensor, new: Tensor) -> Tensor:
        if new.shape[-1] != 10:
            raise ValueError("not ten")
        return total + new

    recorder = ActivationRecorder(["encoder.1", "head"], extra=strictly, reduce=2, every_n_train_steps=1)
    warned = warnings_by(lambda: fit(small(), tmp_path, [recorder], logger=False))
    assert len(warned) == 1
    assert "strictly" in warned[0]
    assert "does not support 'out' of module 'encoder.1': ValueError: not ten" in warned[0]
    assert [list(seen.tensors) for seen in recorder.latest.values()] == [[], ["strictly"]]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")  # of torch
@pytest.mark.parametrize(
    ("result", "drawn"),
    [
        (lambda old, new: new.to_sparse(), True),
        (lambda old, new: new.to_sparse_csr(), True),
        (lambda old, new: new[0].to_sparse(), True),
        (lambda old, new: torch.complex(new, new), True),
        (lambda old, new: new > 0, True),
        (lambda old, new: new.bfloat16() * math.nan, True),
        (lambda old, new: new[:0], False),
        (lambda old, new: new[new > math.inf], False),
    ],
    ids=["sparse", "compressed", "sparse vector", "complex", "bool", "nan", "no rows", "empty"],
)
def test_unusual_results_end_no_output(result: Callable[[Tensor, Tensor], Tensor], drawn: bool, tmp_path: Path) -> None:
    """Sparse, complex and empty results are written to the records, and neither end these nor the pictures."""
    sink = MemorySink()
    recorder = ActivationRecorder(
        "head", extra={"odd": result}, reduce=2, sinks=[sink], **{**QUIET, "outputs": Outputs(plot_every_n_records=1)}
    )
    trainer = fit(Classifier(), tmp_path, [recorder])
    assert len(open_recording(tmp_path if trainer.log_dir is None else trainer.log_dir)["activations"].steps) == 3
    assert {len(images) for tag, images in sink.images.items() if tag.startswith("activations_plots/ridge")} == {3}
    assert ("activations_plots/odd/head" in sink.images) == drawn


def test_a_smaller_batch_is_left_out_of_a_function_with_one_warning(tmp_path: Path) -> None:
    """A function that cannot combine batches of different sizes ignores the smaller one, as in a plain loop."""
    recorder = ActivationRecorder("head", extra=torch.maximum, reduce=2, every_n_train_steps=1)
    (batch,) = digits(1)
    loader: DataLoader[Any] = DataLoader([batch, [each[:3] for each in batch]], batch_size=None)  # type: ignore[arg-type]  # a list
    warned = warnings_by(lambda: fit(small(), tmp_path, [recorder], logger=False, loader=loader))
    assert len(warned) == 1
    assert "set drop_last=True" in warned[0]
    assert recorder.latest[Site("head", "out")].tensors["maximum"].shape == (8, 10)


def test_results_of_a_discarded_step_are_discarded(tmp_path: Path) -> None:
    """The results and the statistics of a record are those of the same steps."""
    recorder = ActivationRecorder("head", extra={"total": rows}, reduce="epoch", strict=True, every_n_train_steps=1)

    class Cut(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    fit(Cut(), tmp_path, [recorder], logger=False)
    seen = recorder.latest[Site("head", "out")]
    assert seen.scalars["count"] == 3 * 80
    assert float(seen.tensors["total"].sum()) == pytest.approx(seen.scalars["mean"] * seen.scalars["count"])


def test_results_of_an_evaluation_cover_all_of_its_batches(tmp_path: Path) -> None:
    """A validation in inference mode has one result over all batches."""
    recorder = ActivationRecorder(
        "head", extra=[torchmetrics.SumMetric(), torch.maximum], schedule=Schedule(stages="validate")
    )
    model = small()
    logits = [model(batch[0]).detach() for batch in digits(2)]
    fit(model, tmp_path, [recorder], logger=False, validation=digits(2), limit_train_batches=0, num_sanity_val_steps=0)
    import lightning.pytorch as pl

    pl.Trainer(logger=False, enable_progress_bar=False, callbacks=[recorder], default_root_dir=tmp_path).validate(
        model, digits(2), verbose=False
    )
    seen = recorder.latest_of("validate")[Site("head", "out")]
    assert torch.equal(seen.tensors["maximum"], torch.maximum(*logits).double())
    assert seen.scalars["sum_metric"] == pytest.approx(float(sum(each.double().sum() for each in logits)), rel=1e-5)


# Findings.


def test_a_finding_about_an_input_names_the_input(tmp_path: Path) -> None:
    """NaN in the data is reported as that of the input of the first module."""

    class Spoiled(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            x = batch[0].clone()
            if self.global_step >= 2:
                x[0, 0, 0, :3] = math.nan
            return F.cross_entropy(self(x), batch[1])

        # The watch would name the operation that wrote the NaN.

    unwatched = Outputs(plots=False, findings=False)
    recorder = ActivationRecorder(tensors=["inputs", "outputs"], **{**UNDRAWN, "outputs": unwatched})
    fit(Spoiled(), tmp_path, [recorder], logger=False)
    found = open_recording(tmp_path).findings
    assert found[0].verdict.startswith("the input in[0] of encoder.conv1 has 3 NaN at step 2")
    assert (found[0].module, found[0].path) == ("encoder.conv1", "in[0]")
