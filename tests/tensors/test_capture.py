"""Copies of the tensors of one step, and the number of copies held at a time."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder import RecorderWarning, read_dump, read_manifest
from lightning_recorder.errors import RecordingError
from lightning_recorder.outputs import DumpFolder, TensorDumps
from lightning_recorder.outputs.dumps import Event
from lightning_recorder.statistics import SiteStatistics
from lightning_recorder.tensors import BufferPool, Captured, TensorCapture

CPU = torch.device("cpu")
KINDS = ("inputs", "outputs", "input_gradients", "output_gradients")


class Given(nn.Module):
    """A module that returns a fixed value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    @override
    def forward(self, x: Tensor) -> Any:
        return self.value


def captured(module: nn.Module, x: Tensor, **options: Any) -> Captured:
    """Return the tensors captured from one call of a module called ``m``."""
    with TensorCapture({"m": module}, strict=True, **options) as capture:
        module(x)
    return capture.take()


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_all_kinds_have_the_values_of_the_step() -> None:
    """Inputs, outputs and both gradients of a linear layer equal values computed by hand."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
    x = torch.tensor([[1.0, 4.0], [0.5, -1.0]], requires_grad=True)
    with TensorCapture({"m": layer}, KINDS, strict=True) as capture:
        (5 * layer(x)).sum().backward()
    found = {name: tensor.tolist() for name, tensor in capture.take().tensors.items()}
    assert found == {
        "m/in[0]": [[1.0, 4.0], [0.5, -1.0]],
        "m/out": [[14.0], [-2.0]],
        "m/out.grad": [[5.0], [5.0]],
        "m/in[0].grad": [[10.0, 15.0], [10.0, 15.0]],
    }


def test_a_copy_is_of_the_moment() -> None:
    """In-place changes to an input or an output do not affect the copies."""
    relu = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 2.0])
    with TensorCapture({"m": relu}, ("inputs", "outputs"), strict=True) as capture:
        relu(x).mul_(10)
    assert {name: tensor.tolist() for name, tensor in capture.take().tensors.items()} == {
        "m/in[0]": [-1.0, 2.0],
        "m/out": [0.0, 2.0],
    }


def test_a_copy_has_memory_of_its_own_and_no_graph() -> None:
    """A copy of a few rows keeps neither the whole batch nor the autograd graph alive."""
    layer = nn.Linear(8, 8)
    x = torch.ones(1000, 8)
    found = captured(layer, x, samples=3).tensors["m/out"]
    assert found.untyped_storage().nbytes() == 3 * 8 * 4
    assert found.grad_fn is None
    assert not found.requires_grad


def test_a_graph_is_freed_while_the_copies_are_held() -> None:
    """After the step only the copies are alive."""
    layer = nn.Linear(4, 4)
    capture = TensorCapture({"m": layer}, KINDS, strict=True)
    with capture:
        x = torch.ones(2, 4, requires_grad=True)
        output = layer(x)
        parts = [weakref.ref(x), weakref.ref(output)]
        saved = torch.exp(output)  # which its node saves as well
        parts.append(weakref.ref(saved))
        saved.sum().backward()
    del x, output, saved
    gc.collect()
    assert len(capture.take().tensors) == 4
    assert [part() for part in parts] == [None, None, None]


def test_calls_are_numbered() -> None:
    """The second call of a module has the suffix ``#2``, and numbering restarts at the next step."""
    layer = nn.Identity()
    with TensorCapture({"m": layer}, strict=True) as capture:
        for value in range(3):
            layer(torch.tensor(float(value)))
        first = capture.take().tensors
        layer(torch.tensor(7.0))
    assert {name: float(tensor) for name, tensor in first.items()} == {"m/out": 0.0, "m/out#2": 1.0, "m/out#3": 2.0}
    assert {name: float(tensor) for name, tensor in capture.take().tensors.items()} == {"m/out": 7.0}


def test_a_gradient_has_the_number_of_its_call() -> None:
    """Numbers are those of the forward pass, also after a call without autograd; they restart at the next step."""
    layer = nn.Identity()
    with TensorCapture({"m": layer}, KINDS, statistics=True, strict=True) as capture:
        for _ in range(2):
            with torch.no_grad():
                layer(torch.tensor(2.0))
            x = torch.tensor(3.0, requires_grad=True)
            (10 * layer(x * 1) + 100 * layer(x * 5)).backward()
            captured = capture.take()
            found = {name: float(tensor) for name, tensor in captured.tensors.items()}
            values = {"": 2.0, "#2": 3.0, "#3": 15.0}
            gradients = {".grad#2": 10.0, ".grad#3": 100.0}
            assert found == {
                f"m/{path}{end}": each for path in ("in[0]", "out") for end, each in (values | gradients).items()
            }
            assert captured.snapshot is not None
            counts = {site.path: each.scalars["count"] for site, each in captured.snapshot.statistics().items()}
            assert counts == {"in[0]": 3, "out": 3, "in[0].grad": 2, "out.grad": 2}  # the calls together


def test_gradients_of_two_backward_passes_are_both_kept() -> None:
    """The gradient of a second backward pass through a call has a name of its own, which is not that of a call."""
    layer = nn.Identity()
    with TensorCapture({"m": layer}, ("output_gradients",), strict=True) as capture:
        x = torch.tensor(3.0, requires_grad=True)
        first, second = layer(x * 1), layer(x * 2)
        (first + 10 * second).backward(retain_graph=True)
        (100 * second).backward()
    found = {name: float(tensor) for name, tensor in capture.take().tensors.items()}
    assert found == {"m/out.grad": 1.0, "m/out.grad#2": 10.0, "m/out.grad#2~2": 100.0}


@pytest.mark.parametrize(("samples", "shape"), [(1, (1, 3)), (2, (2, 3)), (9, (5, 3)), (None, (5, 3))])
def test_samples_are_the_first_rows(samples: int | None, shape: tuple[int, ...]) -> None:
    """The given number of leading rows is copied, or all if there are fewer."""
    x = torch.arange(15.0).reshape(5, 3)
    found = captured(nn.Identity(), x, samples=samples).tensors["m/out"]
    assert tuple(found.shape) == shape
    assert torch.equal(found, x[: shape[0]])


def test_a_number_has_no_rows() -> None:
    """A 0-d tensor is copied unchanged, regardless of ``samples``."""
    assert captured(nn.Identity(), torch.tensor(3.5), samples=1).tensors["m/out"].item() == 3.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_point_tensors_are_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    """Values equal torch's own conversion; integers, booleans and complex numbers are unchanged."""
    kept = {"i": torch.tensor([1, 2]), "b": torch.tensor([True]), "c": torch.tensor([1 + 2j])}
    values = torch.tensor([1 / 3, 1e-6, -70000.0, float("nan"), float("inf")])
    found = captured(Given({"f": values, **kept}), torch.ones(1), dtype=dtype).tensors
    assert bits(found["m/out.f"]) == bits(values.to(dtype))
    assert {name: bits(found[f"m/out.{name}"]) for name in kept} == {name: bits(each) for name, each in kept.items()}


def ragged(layout: torch.layout) -> Tensor:
    parts = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    made: Tensor = torch.nested.nested_tensor(parts, layout=layout)
    return made


LAYOUTS: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "transposed": (lambda: torch.arange(6.0).reshape(2, 3).t(), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])),
    "expanded": (lambda: torch.tensor([2.0]).expand(3), torch.tensor([2.0, 2.0, 2.0])),
    "channels_last": (
        lambda: torch.arange(16.0).reshape(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        torch.arange(16.0).reshape(1, 2, 2, 4),
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), torch.eye(3)),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), torch.eye(3)),
    "conjugate": (lambda: torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    "negative": (lambda: torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0])),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.qint8),
        torch.tensor([0.0, 1.0]),
    ),
    "nested": (lambda: ragged(torch.strided), torch.tensor([[1.0, 0.0], [2.0, 3.0]])),
    "jagged": (lambda: ragged(torch.jagged), torch.tensor([[1.0, 0.0], [2.0, 3.0]])),
    "empty": (lambda: torch.empty(0, 3), torch.empty(0, 3)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other quantized")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_plain_numbers(layout: str, tmp_path: Path) -> None:
    """For any memory layout, the file has the values in row-major order."""
    make, expected = LAYOUTS[layout]
    dumps = TensorDumps(DumpFolder("tensors", group="tensors", directory=tmp_path), ("steps",), strict=True)
    dumps.add(0, 0, captured(Given(make()), torch.ones(1)))
    dumps.wait()
    assert bits(read_dump(tmp_path / "tensors-step=0.safetensors").tensors["m/out"]) == bits(expected)


def test_what_has_no_room_is_left_out() -> None:
    """A step holds at most ``max_bytes`` after ``samples`` and ``dtype`` are applied; other tensors are named."""
    values = (torch.ones(4, 4), torch.ones(4, 5), torch.ones(4, 2))
    # Two rows of two bytes: 16, 20 and 8.
    found = captured(Given(values), torch.ones(1), samples=2, dtype=torch.bfloat16, max_bytes=24)
    assert list(found.tensors) == ["m/out[0]", "m/out[2]"]
    assert found.left_out == ["m/out[1]"]


@pytest.mark.parametrize("factor", [0.25, 1024.0])
def test_gradients_are_multiplied_and_values_are_not(factor: float) -> None:
    """The factor applies only to gradients."""
    layer = nn.Identity()
    capture = TensorCapture({"m": layer}, KINDS, strict=True)
    capture.factor = factor
    x = torch.tensor([3.0], requires_grad=True)
    with capture:
        (2 * layer(x)).backward()
    found = {name: tensor.tolist() for name, tensor in capture.take().tensors.items()}
    assert found["m/in[0]"] == found["m/out"] == [3.0]
    assert found["m/out.grad"] == [2 * factor]


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_loss_scale_is_removed_without_an_underflow(dtype: torch.dtype | None) -> None:
    """Removing the loss scale from a small half-precision gradient does not underflow to zero in the dump."""
    layer = nn.Identity()
    capture = TensorCapture({"m": layer}, ("output_gradients",), dtype=dtype, strict=True)
    capture.factor = 2.0**-16
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    with capture:
        layer(x).backward(torch.tensor([2.0**-10], dtype=torch.float16))
    assert capture.take().tensors["m/out.grad"].tolist() == [2.0**-26]


def test_a_complex_gradient_is_multiplied() -> None:
    """The factor applies to complex gradients, whose dtype remains also if other tensors are rounded."""
    layer = nn.Identity()
    capture = TensorCapture({"m": layer}, ("output_gradients",), dtype=torch.bfloat16, strict=True)
    capture.factor = 4.0
    x = torch.ones(1, dtype=torch.complex64, requires_grad=True)
    with capture:
        layer(x).backward(torch.tensor([3 - 5j]))
    found = capture.take().tensors["m/out.grad"]
    assert (found.dtype, found.tolist()) == (torch.complex64, [12 - 20j])


def test_statistics_are_of_all_rows_before_rounding() -> None:
    """A condition receives statistics of the complete, unrounded tensors of all calls."""
    layer = nn.Identity()
    with TensorCapture({"m": layer}, samples=1, dtype=torch.bfloat16, statistics=True, strict=True) as capture:
        layer(torch.tensor([1.0, 257.0]))
        layer(torch.tensor([-3.0]))
    snapshot = capture.take().snapshot
    assert snapshot is not None
    (seen,) = snapshot.statistics().values()
    assert (seen.scalars["count"], seen.scalars["min"], seen.scalars["max"]) == (3, -3.0, 257.0)
    assert seen.abs_max == 257.0


# Dumps.


def folder(path: Path, **options: Any) -> DumpFolder:
    return DumpFolder("tensors", group="tensors", directory=path, **options)


@contextmanager
def telling() -> Iterator[list[str]]:
    """Collect the messages of this package's warnings."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in told if issubclass(each.category, RecorderWarning)]


def step_of(value: float, size: int = 4) -> Captured:
    return Captured({"m/out": torch.full((size,), value)})


def test_the_latest_is_written_at_epochs_and_checkpoints(tmp_path: Path) -> None:
    """Dumps at epochs and checkpoints hold the tensors of the latest step and are written after queued dumps."""
    dumps = TensorDumps(folder(tmp_path), ("checkpoints", "epochs"), strict=True)
    dumps.write_beside(tmp_path / "none.ckpt")
    dumps.end_epoch()
    for step in range(5):
        dumps.add(step, 1, step_of(step))
        dumps.write_beside(tmp_path / f"{step}.ckpt")
    dumps.end_epoch()
    dumps.wait()
    found = {line["file"]: (line["step"], line["reason"], line.get("checkpoint")) for line in read_manifest(tmp_path)}
    assert found == {
        **{f"{step}.tensors.safetensors": (step, "checkpoint", f"{step}.ckpt") for step in range(5)},
        "tensors-step=4.safetensors": (4, "epoch", None),
    }
    for name, (step, _, _) in found.items():
        assert read_dump(tmp_path / name).tensors["m/out"].tolist() == [float(step)] * 4


def exceeding(seen: SiteStatistics) -> bool:
    return seen.abs_max > 10


def test_an_event_names_its_tensors(tmp_path: Path) -> None:
    """A step is written if the condition is true for any tensor, and the manifest names the tensor."""
    dumps = TensorDumps(folder(tmp_path), (), Event(exceeding, "when", strict=True), strict=True)
    layer = nn.Identity()
    capture = TensorCapture({"a": nn.Identity(), "m": layer}, statistics=True, strict=True)
    for step, value in enumerate([1.0, 11.0, -12.0, 10.0]):
        with capture:
            layer(torch.tensor([value]))
        dumps.add(step, 0, capture.take())
    dumps.wait()
    lines = read_manifest(tmp_path)
    assert [(line["step"], line["reason"], line["event"]) for line in lines] == [
        (1, "event", [["m", "out"]]),
        (2, "event", [["m", "out"]]),
    ]


def test_a_condition_that_raises_gives_one_warning_and_costs_no_dump(tmp_path: Path) -> None:
    """A condition that raises causes one warning and is not called again; other dumps are still written."""
    asked: list[float] = []

    def broken(seen: SiteStatistics) -> bool:
        asked.append(seen.scalars["max"])
        return bool(seen.nothing)

    dumps = TensorDumps(folder(tmp_path), ("steps",), Event(broken, "when", strict=False))
    capture = TensorCapture({"m": nn.Identity()}, statistics=True, strict=True)
    with telling() as told:
        for step in range(3):
            with capture:
                capture.modules["m"](torch.tensor([float(step)]))
            dumps.add(step, 0, capture.take())
        dumps.wait()
    (message,) = told
    assert re.match(r"the recorder: when raised at .*test_capture\.py:\d+: AttributeError: a site has no ", message)
    assert asked == [0.0]
    assert [line["step"] for line in read_manifest(tmp_path)] == [0, 1, 2]


def test_strict_raises_what_a_condition_raises(tmp_path: Path) -> None:
    """With ``strict`` the error is raised in the thread that waits."""
    dumps = TensorDumps(folder(tmp_path), ("steps",), Event(lambda seen: 1 / 0, "when", strict=True), strict=True)
    capture = TensorCapture({"m": nn.Identity()}, statistics=True, strict=True)
    with capture:
        capture.modules["m"](torch.ones(1))
    dumps.add(0, 0, capture.take())
    with pytest.raises(RecordingError, match=r"when raised at .*: ZeroDivisionError"):
        dumps.wait()


def test_a_dtype_that_a_file_cannot_hold_costs_that_tensor_alone(tmp_path: Path) -> None:
    """An unsupported dtype costs only that tensor: the file has the others, and later steps are written too."""
    dumps = TensorDumps(folder(tmp_path), ("steps",))
    module = Given((torch.ones(1, dtype=torch.complex128), torch.ones(1)))
    capture = TensorCapture({"m": module})
    with telling() as told:
        for step in range(2):
            with capture:
                module(torch.ones(1))
            dumps.add(step, 0, capture.take())
        dumps.wait()
    assert ["complex128" in each for each in told] == [True]
    assert [list(line["tensors"]) for line in read_manifest(tmp_path)] == [["m/out[1]"]] * 2


@pytest.mark.parametrize("key", ["a/b", "..", "../../x", "\ud800", "\0", "é", "a#2", "__metadata__", "x" * 300])
def test_names_from_the_model_are_data(key: str, tmp_path: Path) -> None:
    """For any key of an output and any module name, the file is in its folder and can be read back."""
    dumps = TensorDumps(folder(tmp_path / "dumps"), ("steps",), strict=True)
    module = Given({key: torch.tensor([5.0])})
    with TensorCapture({key: module}, strict=True) as capture:
        module(torch.ones(1))
    dumps.add(0, 0, capture.take())
    dumps.wait()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".safetensors"] == [
        "tensors-step=0.safetensors"
    ]
    (tensor,) = read_dump(tmp_path / "dumps" / "tensors-step=0.safetensors").tensors.values()
    assert tensor.tolist() == [5.0]
    (line,) = read_manifest(tmp_path / "dumps")
    assert [kind["shape"] for kind in line["tensors"].values()] == [[1]]


# The number of steps held.


class Slow(DumpFolder):
    """A folder that blocks writes until it is allowed to write."""

    def __init__(self, path: Path) -> None:
        super().__init__("tensors", group="tensors", directory=path)
        self.may_write = threading.Event()

    @override
    def write(self, content: Any, reason: str) -> Path | None:
        self.may_write.wait(20)
        return super().write(content, reason)


@pytest.mark.parametrize("at", [("steps",), ("steps", "checkpoints")])
def test_so_many_steps_are_held_as_is_stated(at: tuple[str, ...], tmp_path: Path) -> None:
    """If the disk is slower than training, at most two steps wait in addition to the one being written."""
    slow = Slow(tmp_path)
    dumps = TensorDumps(slow, at, strict=True)
    held: list[weakref.ref[Tensor]] = []
    added: list[int] = []

    def train() -> None:
        for step in range(8):
            captured = step_of(step)
            held.append(weakref.ref(captured.tensors["m/out"]))
            dumps.add(step, 0, captured)
            added.append(step)
            del captured

    thread = threading.Thread(target=train)
    thread.start()
    while len(held) < 4 and thread.is_alive():  # the fourth step has to wait
        thread.join(0.01)
    thread.join(0.3)
    alive = sum(each() is not None for each in held)
    handed_over = len(added)
    slow.may_write.set()
    thread.join(20)
    dumps.wait()
    assert (handed_over, alive) == (3, 4)  # training waits with the fourth step
    assert [line["step"] for line in read_manifest(tmp_path)] == list(range(8))


@pytest.mark.parametrize(("at", "left"), [(("steps",), []), (("steps", "checkpoints"), [4])])
def test_nothing_but_the_latest_is_held_when_all_is_written(
    at: tuple[str, ...], left: list[int], tmp_path: Path
) -> None:
    """The copies of a step are freed as soon as it is written, not at the next step."""
    dumps = TensorDumps(folder(tmp_path), at, strict=True)
    held: list[weakref.ref[Tensor]] = []
    for step in range(5):
        captured = step_of(step)
        held.append(weakref.ref(captured.tensors["m/out"]))
        dumps.add(step, 0, captured)
        del captured
    dumps.wait()
    gc.collect()
    alive = [step for step, each in enumerate(held) if each() is not None]
    # On the host the latest is the copy itself.
    assert alive == left


def test_a_write_that_fails_costs_its_dump_only(tmp_path: Path) -> None:
    """After a failed write, later dumps are written, and those of pruned checkpoints are still removed."""
    dumps = TensorDumps(folder(tmp_path), ("steps", "checkpoints"))
    dumps.add(0, 0, step_of(0))
    dumps.write_beside(tmp_path / "a.ckpt")
    dumps.wait()
    (tmp_path / "tensors-step=1.safetensors" / "in the way").mkdir(parents=True)
    with telling() as told:
        dumps.add(1, 0, step_of(1))
        dumps.add(2, 0, step_of(2))
        dumps.remove_beside(tmp_path / "a.ckpt")
        dumps.wait()
    (message,) = told
    assert "tensors-step=1.safetensors" in message
    assert sorted(path.name for path in tmp_path.glob("*.safetensors") if path.is_file()) == [
        "tensors-step=0.safetensors",
        "tensors-step=2.safetensors",
    ]


def test_left_out_tensors_give_one_warning_and_are_in_the_manifest(tmp_path: Path) -> None:
    """A single warning names the first tensor left out, and the line of each dump has all of them."""
    dumps = TensorDumps(folder(tmp_path), ("steps",), name="the dumper", strict=True)
    with telling() as told:
        for step in range(2):
            dumps.add(step, 0, Captured({"a/out": torch.ones(1)}, ["b/out", "c/out"]))
        dumps.wait()
    (message,) = told
    assert message == (
        "the dumper: 2 tensors of step 0 are left out, the first is 'b/out': use a larger max_bytes or fewer samples"
    )
    assert [line["left_out"] for line in read_manifest(tmp_path)] == [["b/out", "c/out"]] * 2


def test_what_was_given_back_is_given_again() -> None:
    """A returned tensor is reused for the same shape and dtype; for others a new one is created."""
    pool = BufferPool()
    first = pool.take((2, 3), torch.float32, CPU)
    assert pool.take((2, 3), torch.float32, CPU) is not first
    pool.give_back([first])
    assert pool.take((3, 2), torch.float32, CPU) is not first
    assert pool.take((2, 3), torch.float64, CPU) is not first
    assert pool.take((2, 3), torch.float32, CPU) is first
    assert pool.take((2, 3), torch.float32, CPU) is not first


def test_memory_of_inference_mode_is_reused_outside_of_it() -> None:
    """A tensor that was first needed in inference mode can be written later, with gradients enabled and without."""
    pool, layer, x = BufferPool(), nn.Linear(3, 3), torch.ones(2, 3)
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            found = captured(layer, x, buffers=pool).tensors
        assert torch.equal(found["m/out"], layer(x))
        pool.give_back(found.values())


def test_what_nobody_wants_is_let_go_of() -> None:
    """If shapes differ at each step, memory of at most four steps is kept."""
    pool = BufferPool()
    given = [pool.take((length,), torch.float32, CPU) for length in range(1, 7)]
    for tensor in given:
        pool.give_back([tensor])
    again = [pool.take((length,), torch.float32, CPU) for length in range(1, 7)]
    assert [a is b for a, b in zip(given, again, strict=True)] == [False, False, True, True, True, True]
