"""The graph that the callback records of a real training step, and its picture."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import stat
import sys
import xml.etree.ElementTree as ET
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image as Picture
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_recorder import (
    ActivationRecorder,
    ArgumentError,
    GradientRecorder,
    Graph,
    GraphRecorder,
    MemorySink,
    RecorderWarning,
)
from tests.callbacks.models import Classifier, digits, events, fit, hooks_left


def flow(graph: Graph) -> list[str]:
    """Return the edges as text, without parameters and buffers."""
    return [
        f"{graph[edge.source].name} -> {graph[edge.target].name}"
        for edge in graph.edges
        if graph[edge.source].kind not in ("parameter", "buffer")
    ]


def test_the_graph_is_that_of_the_training_step_with_its_loss(tmp_path: Path) -> None:
    """One graph has the batch, modules, functions between them, loss and backward pass, without the trainer."""
    recorder = GraphRecorder()
    fit(Classifier(), tmp_path, [recorder, ActivationRecorder(), GradientRecorder()], gradient_clip_val=1.0)
    graph = recorder.graph
    assert graph is not None
    assert graph.scope == "training_step"
    assert graph.root.type_name == "Classifier"
    assert [(node.name, node.type_name) for node in graph.module_calls()] == [
        ("encoder", "Encoder"),
        ("encoder.conv1", "Conv2d"),
        ("encoder.norm", "BatchNorm2d"),
        ("encoder.relu", "ReLU"),
        ("encoder.conv2", "Conv2d"),
        ("dropout", "Dropout"),
        ("head", "Linear"),
    ]
    assert flow(graph) == [
        "batch[0] -> conv2d",
        "conv2d -> batch_norm",
        "batch_norm -> relu",
        "relu -> conv2d",
        "relu -> add",
        "conv2d -> add",
        "add -> relu",
        "relu -> flatten",
        "flatten -> dropout",
        "dropout -> linear",
        "linear -> cross_entropy",
        "batch[1] -> cross_entropy",
        # The model stores a copy of its loss. The values of self.log belong to the trainer and are not in the graph.
        "cross_entropy -> detach",
        "detach -> clone",
        "cross_entropy -> backward",
        "backward -> Adam",
    ]


def test_files_and_picture_are_written_once(tmp_path: Path) -> None:
    """JSON, DOT, SVG and PNG are in the recorder folder, and TensorBoard has the picture once, at the first step."""
    recorder = GraphRecorder()
    trainer = fit(Classifier(), tmp_path, [recorder], max_epochs=3)
    folder = Path(str(trainer.log_dir)) / "recorder"
    event_file, *names = sorted(path.name for path in folder.iterdir())
    assert event_file.startswith("events.out.tfevents.")
    assert names == ["graph.dot", "graph.json", "graph.png", "graph.svg"]
    assert Graph.from_json(json.loads((folder / "graph.json").read_text())) == recorder.graph
    text = "".join(ET.parse(folder / "graph.svg").getroot().itertext())
    assert "conv1" in text
    assert "cross_entropy" in text
    (event,) = events(trainer).Images("z_recorder/graph")
    assert event.step == 0
    with (
        Picture.open(folder / "graph.png") as written,
        Picture.open(io.BytesIO(event.encoded_image_string)) as shown,
    ):
        assert np.array_equal(np.asarray(written.convert("RGB")), np.asarray(shown))


def test_the_sanity_check_is_not_what_is_recorded(tmp_path: Path) -> None:
    """If validation runs first, the training step is still the one that is recorded."""
    recorder = GraphRecorder()
    fit(Classifier(), tmp_path, [recorder], validation=digits(2))
    assert recorder.graph is not None
    assert flow(recorder.graph)[-2:] == ["cross_entropy -> backward", "backward -> Adam"]


def test_manual_optimization_shows_each_forward_and_backward(tmp_path: Path) -> None:
    """A GAN's step shows both losses with their backward passes, and no optimizer operation."""

    class Gan(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Linear(4, 64)
            self.discriminator = nn.Linear(64, 1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            first, second = self.trainer.strategy._lightning_optimizers
            real = batch[0].flatten(1)
            fake = self.generator(real[:, :4])
            judged = self.discriminator(real).mean() - self.discriminator(fake.detach()).mean()
            first.zero_grad()
            self.manual_backward(judged)
            first.step()
            fooled = -self.discriminator(fake).mean()
            second.zero_grad()
            fooled.backward()
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters()) for part in (self.discriminator, self.generator)]

    recorder = GraphRecorder(strict=True)
    fit(Gan(), tmp_path, [recorder])
    graph = recorder.graph
    assert graph is not None
    calls = [(node.name, node.call) for node in graph.module_calls()]
    assert calls == [("generator", 1), *[("discriminator", call) for call in (1, 2, 3)]]
    assert [line for line in flow(graph) if line.endswith("backward")] == ["sub -> backward", "neg -> backward"]
    assert {node.name for node in graph.nodes if node.kind == "op"} == {
        "flatten", "getitem", "linear", "mean", "detach", "sub", "neg",
    }  # fmt: skip


def test_accumulated_batches_show_the_first_of_them(tmp_path: Path) -> None:
    """With gradient accumulation, the graph shows one batch, whose loss enters the backward pass undivided."""
    recorder = GraphRecorder()
    fit(Classifier(), tmp_path, [recorder], accumulate_grad_batches=3)
    assert recorder.graph is not None
    assert flow(recorder.graph).count("cross_entropy -> backward") == 1


def test_mixed_precision_shows_its_types(tmp_path: Path) -> None:
    """Under ``bf16-mixed``, the graph has the same calls as without, and the dtypes that autocast chose."""
    graphs = []
    for precision in ("32-true", "bf16-mixed"):
        recorder = GraphRecorder(formats=(), strict=True)
        fit(Classifier(), tmp_path, [recorder], logger=False, precision=precision)
        assert recorder.graph is not None
        graphs.append(recorder.graph)
    whole, mixed = graphs
    assert [each.name for each in whole.module_calls()] == [each.name for each in mixed.module_calls()]
    dtypes = {each.name: each.outputs[0].dtype for each in mixed.module_calls()}
    assert (dtypes["encoder.conv1"], dtypes["head"]) == ("bfloat16", "bfloat16")
    assert flow(mixed)[-2:] == flow(whole)[-2:] == ["cross_entropy -> backward", "backward -> Adam"]


def test_loggers_without_images_leave_the_picture_in_the_folder(tmp_path: Path) -> None:
    """With a CSV logger, the picture is in its folder and there is no warning."""
    trainer = fit(Classifier(), tmp_path, [GraphRecorder()], logger=CSVLogger(tmp_path))
    assert (Path(str(trainer.log_dir)) / "recorder" / "graph.png").is_file()


def test_without_logger_the_picture_lies_in_the_root_folder(tmp_path: Path) -> None:
    """With ``logger=False``, the recorder folder is in the trainer's root folder."""
    fit(Classifier(), tmp_path, [GraphRecorder(formats="svg")], logger=False)
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == ["graph.dot", "graph.json", "graph.svg"]


def test_fast_dev_run_records_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fast_dev_run`` records the graph in memory only."""
    monkeypatch.chdir(tmp_path)
    sink = MemorySink()
    fit(Classifier(), tmp_path, [GraphRecorder(sinks=[sink])], fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []
    assert sink.graphs["graph"][0].root.type_name == "Classifier"


def test_without_a_renderer_the_document_is_there_and_one_warning_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dot and pygraphviz, the run continues with the DOT file and one warning."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = Classifier()
    with pytest.warns(RecorderWarning, match=r"without a picture.*pip install pygraphviz") as warned:
        fit(model, tmp_path, [GraphRecorder()], logger=False)
    assert sum(each.category is RecorderWarning for each in warned) == 1
    assert (tmp_path / "recorder" / "graph.dot").read_text().startswith("digraph")
    assert len(model.losses) == 6


def test_a_hanging_renderer_costs_only_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging dot is ended after its time limit, with one warning, and leaves no file."""
    fake = tmp_path / "bin" / "dot"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.warns(RecorderWarning, match=r"without a picture.*it was stopped"):
        fit(Classifier(), tmp_path, [GraphRecorder(timeout_s=0.2)], logger=False)
    assert sorted(path.name for path in (tmp_path / "recorder").iterdir()) == ["graph.dot", "graph.json"]


def test_a_folder_that_cannot_be_written_costs_only_the_graph(tmp_path: Path) -> None:
    """A file in place of the folder causes one warning, and the run continues."""
    (tmp_path / "recorder").write_text("in the way")
    model = Classifier()
    with pytest.warns(RecorderWarning, match="lightning_recorder could not write to .*graph.json"):
        fit(model, tmp_path, [GraphRecorder()], logger=False)
    assert len(model.losses) == 6
    assert hooks_left(model) == []


def test_depth_and_budget_choose_the_view(tmp_path: Path) -> None:
    """``depth=1`` draws the encoder as one box, and the JSON still has everything."""
    fit(Classifier(), tmp_path, [GraphRecorder(depth=1, formats=())], logger=False)
    document = (tmp_path / "recorder" / "graph.dot").read_text()
    assert document.count("subgraph") == document.count("subgraph cluster_loss {") == 1
    assert ">encoder<" in document
    assert "conv1" not in document
    assert "encoder.conv1" in (tmp_path / "recorder" / "graph.json").read_text()


# The recorded step.


def test_the_first_validation_step(tmp_path: Path) -> None:
    """``stage="validate"`` records the first validation step after the sanity check, without a backward pass."""

    class Validated(Classifier):
        seen = 0

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen += 1
            self.log("seen", float(self(batch[0]).sum()) + self.seen)

    recorder = GraphRecorder(stage="validate", formats=(), strict=True)
    fit(Validated(), tmp_path, [recorder], validation=digits(2), logger=False)
    graph = recorder.graph
    assert graph is not None
    assert graph.scope == "validation_step"
    assert flow(graph)[0].startswith("batch[0] -> ")
    assert not any(node.kind in ("backward", "optimizer") for node in graph.nodes)


def test_the_example_input(tmp_path: Path) -> None:
    """With ``stage="example"``, a call with ``example_input_array`` is recorded, and the fit is unchanged."""

    class WithExample(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(2, 1, 8, 8)

    losses = []
    for callbacks in ([], [recorder := GraphRecorder(stage="example", formats=(), strict=True)]):
        torch.manual_seed(0)
        model = WithExample()
        fit(model, tmp_path, callbacks, logger=False)
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert recorder.graph is not None
    assert [(node.kind, str(node.outputs[0])) for node in recorder.graph.nodes if node.kind in ("input", "output")] == [
        ("input", "2×1×8×8"),
        ("output", "2×10"),
    ]


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_an_example_that_is_the_only_argument(tmp_path: Path, kind: type) -> None:
    """If the model takes the whole batch as its one argument, the example is passed as a whole."""

    class Taking(Classifier):
        def __init__(self) -> None:
            super().__init__()
            images, labels = torch.ones(2, 1, 8, 8), torch.zeros(2)
            parts = {"x": images, "y": labels}
            self.example_input_array = parts if kind is dict else kind(parts.values())

        def forward(self, batch: Any) -> Tensor:
            if isinstance(batch, Tensor):
                return super().forward(batch)
            return super().forward(batch["x"] if isinstance(batch, dict) else batch[0])

    recorder = GraphRecorder(stage="example", formats=(), strict=True)
    fit(Taking(), tmp_path, [recorder], logger=False)
    assert recorder.graph is not None
    assert flow(recorder.graph)[0] == f"input{'.x' if kind is dict else '[0]'} -> conv2d"


def test_without_an_example_input_the_error_names_the_fix(tmp_path: Path) -> None:
    """``stage="example"`` without an ``example_input_array`` raises at fit start."""
    with pytest.raises(ArgumentError, match=r"stage='example' needs Classifier.example_input_array.*set it, or leave"):
        fit(Classifier(), tmp_path, [GraphRecorder(stage="example")], logger=False)


def test_a_resumed_run_is_not_recorded_again(tmp_path: Path) -> None:
    """A run that resumes from a checkpoint keeps its first graph; a new run is recorded."""
    recorder = GraphRecorder(formats=())
    trainer = fit(Classifier(), tmp_path, [recorder], logger=False)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = GraphRecorder(formats=())
    longer = Trainer(
        max_epochs=2, default_root_dir=tmp_path, callbacks=[again], logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    longer.fit(Classifier(), digits(3), ckpt_path=tmp_path / "last.ckpt")
    assert longer.current_epoch == 2
    assert again.graph is None
    longer.save_checkpoint(tmp_path / "longer.ckpt")
    saved = torch.load(tmp_path / "longer.ckpt", weights_only=True)
    assert saved["callbacks"][again.state_key] == {"recorded": True}
    assert recorder.graph is not None


def test_a_second_fit_is_recorded_like_the_first(tmp_path: Path) -> None:
    """The operations of the trainer's own logging are not part of the graph, in a second fit either."""
    recorder = GraphRecorder(formats=())
    model, graphs = Classifier(), []
    trainer = fit(model, tmp_path, [recorder], logger=False)
    graphs.append(recorder.graph)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, digits(2))
    graphs.append(recorder.graph)
    first, second = ([node.name for node in graph.nodes if node.kind == "op"] for graph in graphs if graph is not None)
    assert first == second


def test_a_copy_of_the_callback_does_not_copy_the_model(tmp_path: Path) -> None:
    """A copy of a callback after a fit does not contain the model."""
    model = Classifier()
    recorder = GraphRecorder(formats=())
    fit(model, tmp_path, [recorder], logger=False)
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(recorder, memo)
    assert id(model) not in memo
    assert twin.graph is None


def test_two_recorders_under_two_names(tmp_path: Path) -> None:
    """Two of these callbacks with different names write different files and tags."""
    sink = MemorySink()
    callbacks = [
        GraphRecorder(formats=(), sinks=[sink]),
        GraphRecorder(name="small", depth=1, formats=(), sinks=[sink]),
    ]
    fit(Classifier(), tmp_path, callbacks, logger=False)
    written = sorted(path.name for path in (tmp_path / "recorder").iterdir())
    assert written == ["graph.dot", "graph.json", "small.dot", "small.json"]
    assert sorted(sink.graphs) == ["graph", "small"]


def test_a_failing_step_shows_where(tmp_path: Path) -> None:
    """If the recorded step raises, the graph up to the marked failure is written, and the error propagates."""

    class Broken(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]) @ torch.ones(3, 3), batch[1])

    recorder = GraphRecorder(formats=())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(Broken(), tmp_path, [recorder], logger=False)
    graph = Graph.from_json(json.loads((tmp_path / "recorder" / "graph.json").read_text()))
    assert graph == recorder.graph
    assert [node.name for node in graph.nodes if node.failed] == ["", "matmul"]
    assert "it raised" in (tmp_path / "recorder" / "graph.dot").read_text(encoding="utf-8")
    saved: dict[str, Any] = {}
    recorder.on_save_checkpoint(Trainer(logger=False, enable_checkpointing=False), Broken(), saved)
    assert saved["callbacks"][recorder.state_key] == {"recorded": False}


def test_a_picture_that_cannot_be_laid_out_is_drawn_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If dot fails, a smaller view is drawn with one warning."""
    real = shutil.which("dot")
    drawn = f'exec "{real}" "$@"' if real else f'exec "{sys.executable}" "{tmp_path / "bin" / "draw.py"}" "$@"'
    fake = tmp_path / "bin" / "dot"
    fake.parent.mkdir()
    (fake.parent / "draw.py").write_text(
        "import sys, pygraphviz\n"
        "graph = pygraphviz.AGraph(string=sys.stdin.read())\n"
        "sys.stdout.buffer.write(graph.draw(format=sys.argv[2][2:], prog=sys.argv[1][2:]))\n"
    )
    # Fails on the first call.
    fake.write_text(f'#!/bin/sh\nif mkdir "{tmp_path}/first" 2>/dev/null; then exit 3; fi\n{drawn}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.warns(RecorderWarning, match=r"is reduced: it shows at most 52 nodes.*it failed"):
        fit(Classifier(), tmp_path, [GraphRecorder(formats="svg")], logger=False)
    assert "conv1" in "".join(ET.parse(tmp_path / "recorder" / "graph.svg").getroot().itertext())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"max_nodes": "many"}, "max_nodes must be an integer of at least 1, got 'many'"),
        ({"direction": "up"}, "direction must be one of TB, LR, BT, RL, got 'up'"),
        ({"formats": ["jpg"]}, "formats must be one or more of 'svg', 'png', 'pdf'; got 'jpg'"),
        ({"styler": 3}, "styler must be a GraphvizStyler, got 3"),
        ({"timeout_s": 0}, "timeout_s must be positive, got 0"),
        ({"stage": "test"}, "stage must be one of train, validate, example, got 'test'"),
        ({"name": ""}, "name must be a file name without a folder, got ''"),
        ({"name": "../graph"}, "name must be a file name without a folder, got '../graph'"),
    ],
)
def test_wrong_arguments_raise_at_construction(arguments: dict[str, Any], message: str) -> None:
    """An invalid argument raises at construction, and the message names the allowed values."""
    with pytest.raises(ArgumentError, match=message):
        GraphRecorder(**arguments)


def test_a_recording_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the recording of an operation ends the recording but not the step; earlier operations are kept."""

    def broken(func: Any) -> str:
        if func.__name__ == "batch_norm":  # after conv2d and the increase of num_batches_tracked
            raise LookupError("ours")
        return "op"

    monkeypatch.setattr(sys.modules["lightning_recorder.graph.capture.step"], "function_name", broken)
    model = Classifier()
    recorder = GraphRecorder(formats=())
    with pytest.warns(RecorderWarning, match="the graph is incomplete: LookupError: ours"):
        fit(model, tmp_path, [recorder], logger=False)
    assert len(model.losses) == 6
    assert recorder.graph is not None
    assert sum(node.kind == "op" for node in recorder.graph.nodes) == 2


class _ClosedAtFirst(UserDict[str, Tensor]):
    """A batch that cannot be read the first time."""

    is_closed = True

    def items(self) -> Any:
        if self.is_closed:
            type(self).is_closed = False
            raise LookupError("it is closed")
        return super().items()


def test_a_batch_that_cannot_be_read_costs_its_inputs_only(tmp_path: Path) -> None:
    """If the items of a batch raise, the graph has no inputs, and everything else."""

    class OfMappings(Classifier):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch["x"]), batch["y"])

    def batch(_: Any) -> Any:
        return _ClosedAtFirst(x=torch.zeros(2, 1, 8, 8), y=torch.zeros(2, dtype=torch.long))

    batches: Any = DataLoader(range(3), collate_fn=batch)  # type: ignore[arg-type]  # any sequence is a data set
    recorder = GraphRecorder(formats=())
    fit(OfMappings(), tmp_path, [recorder], loader=batches, logger=False)
    assert recorder.graph is not None
    assert "cross_entropy" in [node.name for node in recorder.graph.nodes]


def test_compiled_submodule_is_recorded_eagerly(tmp_path: Path) -> None:
    """A compiled submodule shows its modules, and is compiled once for the later steps."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiled(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1])

    model = Compiled()
    model.encoder.compile(backend=backend)
    recorder = GraphRecorder(formats=())
    fit(model, tmp_path, [recorder], logger=False)
    assert recorder.graph is not None
    assert "encoder.conv2" in [node.name for node in recorder.graph.module_calls()]
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_unused_modules_are_drawn_on_request(tmp_path: Path) -> None:
    """With ``unused=True`` the picture has a node for a module that was never called."""
    model = Classifier()
    model.spare = nn.Linear(2, 2)
    recorders = [GraphRecorder(formats=(), name=f"graph_{unused}", unused=unused) for unused in (False, True)]
    fit(model, tmp_path, recorders, logger=False)
    drawn = ["never called" in (tmp_path / "recorder" / f"graph_{each}.dot").read_text() for each in (False, True)]
    assert drawn == [False, True]
