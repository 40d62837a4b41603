"""The five recorders: selected tensors, counts and reductions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recorder import (
    ArgumentError,
    BackwardInput,
    BackwardOutput,
    DumpError,
    ForwardInput,
    ForwardOutput,
    ForwardPre,
    RecorderWarning,
    RecordingError,
    Selection,
    SelectionError,
    read_dump,
)
from lightning_recorder.reductions import RunningMoments
from lightning_recorder.tensors import Recorder
from tests import forks
from tests.reductions.test_accumulators import equal
from tests.taps.inspection import hooks_on

KINDS: list[type[Recorder]] = [ForwardPre, ForwardInput, ForwardOutput, BackwardInput, BackwardOutput]
each_kind = pytest.mark.parametrize("kind", KINDS)


def network() -> nn.Sequential:
    """Build two linear layers with an activation between them, with integer weights."""
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) - number)
    return net


def batch(rows: int = 4) -> Tensor:
    """Return a batch that requires a gradient, so that each module's input has one."""
    return torch.arange(rows * 3.0).reshape(rows, 3).requires_grad_()


def train(net: nn.Module, *batches: Tensor) -> None:
    """Run a forward and a backward pass for each batch."""
    for each in batches:
        net(each).sum().backward()


def forward(net: nn.Module, x: Tensor, times: int) -> None:
    """Run the same forward pass several times."""
    for _ in range(times):
        net(x)


# Recorded tensors.


def expected(kind: type[Recorder], net: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Return the expected data of a recorder of the children, computed without hooks."""
    values = [x]
    for layer in net:
        values.append(layer(values[-1]))
    grads: tuple[Tensor, ...] = torch.autograd.grad(values[-1].sum(), values)
    rows = {ForwardOutput: values[1:], BackwardInput: grads[:-1], BackwardOutput: grads[1:]}.get(kind, values[:-1])
    return [each.detach() for each in rows]


@each_kind
def test_each_recorder_sees_its_tensors(kind: type[Recorder]) -> None:
    """Inputs and outputs, forward and backward, equal those of autograd for each module."""
    net, x = network(), batch()
    recorder = kind().children(net)
    train(net, x)
    assert [len(each) for each in recorder] == [1, 1, 1]
    assert equal([each[0] for each in recorder], expected(kind, net, x))


@each_kind
def test_data_is_bound_to_its_module(kind: type[Recorder]) -> None:
    """Each module's data have its position, however modules are nested, ordered, skipped or called out of order."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    outer = nn.ModuleDict({"late": nn.Linear(2, 5), "never": nn.Linear(2, 2), "early": inner})
    recorder = kind().modules(outer)
    outer["late"](outer["early"](torch.ones(4, 2, requires_grad=True))).sum().backward()
    assert recorder.names == ["", "late", "never", "early", "early.0", "early.1"]
    widths = [[each.shape[-1] for each in data] for data in recorder]
    takes = kind in (ForwardPre, ForwardInput, BackwardInput)
    assert widths == [[], [2 if takes else 5], [], [2], [2], [2]]


def test_pre_is_before_and_input_is_after_an_in_place_module() -> None:
    """ForwardPre has the input of an in-place module, ForwardInput and ForwardOutput its result."""
    relu = nn.ReLU(inplace=True)
    net = nn.Sequential(relu)
    recorders = [kind().children(net) for kind in (ForwardPre, ForwardInput, ForwardOutput)]
    net(torch.tensor([-1.0, 2.0]))
    assert [each[0][0].tolist() for each in recorders] == [[-1.0, 2.0], [0.0, 2.0], [0.0, 2.0]]


def test_a_module_that_raises_has_an_input_and_no_more() -> None:
    """For a call that fails, only the input before the call is recorded."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(7, 1))
    recorders = [kind().children(net) for kind in (ForwardPre, ForwardInput, ForwardOutput)]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(torch.ones(4, 3))
    assert [[len(data) for data in each] for each in recorders] == [[1, 1], [1, 0], [1, 0]]


class Nested(nn.Module):
    """A module that takes and returns nested values, some of which are not tensors."""

    def forward(self, x: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        return {"sum": x + extra["bias"], "parts": [x * 2, None, 3], "none": None}


def test_several_tensors_have_paths() -> None:
    """The data of a module with several tensors are a dictionary by path, including keyword arguments."""
    net = Nested()
    x = torch.ones(2, 3)
    with ForwardPre(reduction=torch.add).modules(net) as inputs, ForwardOutput().modules(net) as outputs:
        for _ in range(2):
            net(x, extra={"bias": 2 * x, "skip": None})
    assert equal(inputs[0], {"in[0]": 2 * x, "in.extra.bias": 4 * x})
    assert equal(outputs[0], {"out.sum": [3 * x] * 2, "out.parts[0]": [2 * x] * 2})
    assert inputs.subrecorders[0].paths.keys() == {"in[0]", "in.extra.bias"}


@pytest.mark.parametrize("output", [None, {}, {"a": None}, 3, "text", [], torch.tensor(2.0), {"a": torch.tensor(2.0)}])
def test_no_output_breaks_the_forward_pass(output: Any) -> None:
    """No module output raises or warns, and a tensor without dimensions counts as one sample."""

    class Gives(nn.Module):
        def forward(self, *, x: Tensor) -> Any:
            return output

    net = Gives()
    recorders = [kind(strict=True).modules(net) for kind in KINDS]
    assert net(x=torch.ones(2)) is output
    found = output["a"] if isinstance(output, dict) and output else output
    assert recorders[KINDS.index(ForwardOutput)].samples(0) == int(isinstance(found, Tensor))


# Condition and counts.


@each_kind
def test_a_false_condition_changes_nothing(kind: type[Recorder]) -> None:
    """While the condition is false neither data nor counts change; while it is true both do."""
    net, on = network(), [True]
    recorder = kind(condition=lambda: on[0]).children(net)
    train(net, batch(4))
    before = copy.deepcopy((recorder.data, list(recorder.iter_samples()), [recorder.calls(each) for each in range(3)]))
    on[0] = False
    train(net, batch(4))
    after = (recorder.data, list(recorder.iter_samples()), [recorder.calls(each) for each in range(3)])
    assert equal(before, after)
    assert after[1:] == ([4, 4, 4], [1, 1, 1])


@each_kind
@pytest.mark.parametrize("reduction", [None, lambda total, new: total + new.sum()])
def test_samples_are_rows_and_calls_are_calls(kind: type[Recorder], reduction: Any) -> None:
    """Three batches of 4, 4 and 2 rows are ten samples and three calls."""
    net = network()
    recorder = kind(reduction=reduction).children(net)
    train(net, batch(4), batch(4), batch(2))
    assert list(recorder.iter_samples()) == [recorder.samples(each) for each in range(3)] == [10, 10, 10]
    assert [recorder.calls(each) for each in range(3)] == [3, 3, 3]


def test_several_tensors_of_a_call_are_one_call() -> None:
    """The counts of a module with several tensors are those of calls and rows, not of tensors."""
    lstm = nn.LSTM(3, 2)
    with ForwardOutput().modules(lstm) as recorder:
        lstm(torch.ones(5, 1, 3))
        lstm(torch.ones(7, 1, 3))
    assert (recorder.samples(0), recorder.calls(0)) == (12, 2)


# Selection.


def test_children_and_modules_are_those_of_torch() -> None:
    """Without types and indices, ``children`` and ``modules`` register the modules that torch lists, in its order."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    recorders = ForwardPre().children(net), ForwardPre().modules(net)
    assert [each.module for each in recorders[0].subrecorders] == list(net.children())
    assert [each.module for each in recorders[1].subrecorders] == list(net.modules())


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"types": nn.Linear}, ["0", "2", "4"]),
        ({"types": (nn.Linear, nn.Tanh)}, ["0", "2", "3", "4"]),
        ({"types": "Linear", "indices": (1, 2, 3)}, ["2"]),
        ({"indices": [0, 3]}, ["0", "3"]),
        ({"indices": 4}, ["4"]),
        ({"indices": range(2)}, ["0", "1"]),
    ],
)
def test_types_and_positions_must_both_hold(arguments: dict[str, Any], names: list[str]) -> None:
    """Children are selected by types, by indices, or by both if both are given."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert ForwardPre().children(net, **arguments).names == names
    # Among all modules the root has index 0.
    if "indices" not in arguments:
        assert ForwardPre().modules(net, **arguments).names == names


@pytest.mark.parametrize("method", [ForwardPre.children, ForwardPre.modules])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"types": nn.Conv2d}, "no module is of types=.*Conv2d.* there are 0: "),
        ({"types": nn.ReLU, "indices": 0}, "no module is of types=.* at indices=0"),
        ({"indices": (1, 9)}, r"indices=\[9\]: there are \d modules, at 0 to \d"),
    ],
)
def test_a_choice_of_nothing_is_an_error(
    method: Callable[..., Recorder], arguments: dict[str, Any], message: str
) -> None:
    """Types and indices that match no module raise an error that lists the modules, and no hook is left."""
    net = network()
    with pytest.raises(SelectionError, match=message):
        method(ForwardPre(), net, **arguments)
    assert hooks_on(net) == []


def test_choices_can_be_chained() -> None:
    """Each call appends its modules to the others; a duplicate name gets a number."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    other = nn.ModuleDict({"head": nn.Linear(2, 1), "tail": nn.Tanh()})
    recorder = ForwardPre().children(net, types=nn.Linear).modules(net, indices=1).select(other, "head")
    recorder.select(other, Selection(types=nn.Tanh)).select(other)
    assert recorder.names == ["0", "0 (2)", "head", "tail", "head (2)", "tail (2)"]
    assert len(recorder) == 6


# Access.


def test_data_is_reached_by_position_and_name() -> None:
    """Indexing, iteration and data return the same values; an unknown name raises an error that lists the names."""
    net = network()
    recorder = ForwardOutput(reduction=torch.add).children(net)
    train(net, batch())
    assert all(each is recorder[place] is recorder[str(place)] for place, each in enumerate(recorder))
    assert recorder.data[1] is recorder[1]
    assert recorder.samples("1") == recorder.samples(1) == 4
    assert recorder[-1] is recorder[2]
    with pytest.raises(IndexError):
        recorder[3]
    with pytest.raises(KeyError, match="no module 'relu' is recorded; there are '0', '1', '2'"):
        recorder["relu"]


@each_kind
def test_assigned_data_are_those_of_the_module(kind: type[Recorder]) -> None:
    """Assigning by position, name, slice or ``data`` replaces the data of the module, and recording continues."""
    net = network()
    recorder = kind().children(net)
    train(net, batch())
    new = [[torch.full((1,), float(value))] for value in range(4)]
    recorder[0], recorder["1"], recorder.data[-1] = new[0], new[1], new[2]
    assert [each is mine for each, mine in zip(recorder, new, strict=False)] == [True] * 3
    recorder[1:], recorder.data[:1] = [new[0], new[1]], [new[3]]
    assert [recorder[0] is new[3], recorder[1] is new[0], recorder[2] is new[1]] == [True] * 3
    assert equal(recorder[::-1], [new[1], new[0], new[3]])
    recorder[0:2][1] = new[2]
    assert recorder["1"] is new[2]
    train(net, batch())
    assert [len(each) for each in recorder] == [2, 2, 2]


def test_an_assignment_is_bound_to_its_module() -> None:
    """Data read before a module was removed still belong to the modules that they were read from."""
    recorder = ForwardPre(reduction=torch.add).children(network())
    data = recorder.data
    del recorder[0]
    data[2] = torch.tensor(7.0)
    data[0] = torch.tensor(1.0)
    assert (recorder.names, recorder["2"].item(), recorder["1"]) == (["1", "2"], 7.0, None)
    del recorder[-1:]
    assert recorder.names == ["1"]


def test_a_reduction_continues_from_assigned_data() -> None:
    """A two-argument function receives the assigned data, even before the first tensor."""
    net, x = network(), batch()
    recorder = ForwardPre(reduction=torch.add).children(net, indices=0)
    recorder[0] = torch.full((4, 3), 10.0)
    assert recorder[0].sum() == 120
    net(x)
    assert equal(recorder[0], x.detach() + 10)
    recorder[0] = torch.zeros(4, 3)
    net(x)
    assert equal(recorder[0], x.detach())


def test_the_data_of_a_path_can_be_assigned() -> None:
    """For a module with several tensors, each path or all of them can be assigned."""
    net, x = Nested(), torch.ones(2, 3)
    recorder = ForwardPre(reduction=torch.add).modules(net)
    net(x, extra={"bias": x})
    recorder[0]["in[0]"] = x * 5
    recorder.subrecorders[0].paths["in.extra.bias"] = x * 6
    assert equal(recorder.data, [{"in[0]": x * 5, "in.extra.bias": x * 6}])
    recorder[0] = {"in[0]": x, "in.extra.bias": x}
    recorder[0].update({"in[0]": x * 2})
    net(x, extra={"bias": x})
    assert equal(recorder[0], {"in[0]": x * 3, "in.extra.bias": x * 2})
    with pytest.raises(KeyError, match=r"at 'in\[1\]' of the module '': did you mean 'in\[0\]'\?"):
        recorder[0]["in[1]"] = x
    with pytest.raises(
        ArgumentError, match=r"module '' has data for several tensors: assign to .* its path 'in\[0\]', 'in.extra"
    ):
        recorder[0] = x


def test_data_keep_their_number() -> None:
    """Adding or deleting an entry raises an error with the remedy and does not change the recorder."""
    recorder = ForwardPre().children(network())
    with pytest.raises(TypeError, match=r"recorder\.remove\(…\) removes a module"):
        del recorder.data[0]
    with pytest.raises(TypeError, match="entries can be assigned"):
        recorder.data.append(1)
    with pytest.raises(ValueError, match="cannot assign 1 values to the data of 2 modules"):
        recorder[:2] = [1]
    assert recorder.data == [[], [], []]


def test_a_copy_of_data_is_plain(tmp_path: Path) -> None:
    """A copy is a plain list that is independent of the recorder, and saved paths load without custom classes."""
    net, x = Nested(), torch.ones(2, 3)
    recorder = ForwardPre(reduction=torch.add).modules(net)
    net(x, extra={"bias": x})
    for each in (copy.deepcopy(recorder.data), pickle.loads(pickle.dumps(recorder.data))):
        assert type(each) is list
        assert equal([dict(each[0])], recorder.data)
    torch.save([*recorder], tmp_path / "data.pt")
    assert equal(torch.load(tmp_path / "data.pt", weights_only=True), recorder.data)


def test_a_reduction_of_the_wrong_arity_is_refused() -> None:
    """A function that cannot be called with two arguments is rejected at construction, with its line."""

    def one(x: Tensor) -> Tensor:
        return x

    with pytest.raises(
        ArgumentError, match=r"reduction takes a function \(before, new\) .*test_recorders.py:\d+ takes \(x\)$"
    ):
        ForwardPre(reduction=one)  # type: ignore[arg-type]  # the point of the test


def test_before_the_first_tensor_there_is_nothing() -> None:
    """Before the first tensor the data are an empty list without a reduction, and None with one."""
    assert ForwardPre().children(network()).data == [[], [], []]
    for reduction in (torch.add, RunningMoments, torchmetrics.MeanMetric()):
        assert ForwardPre(reduction=reduction).children(network()).data == [None] * 3


@each_kind
def test_remove_gives_the_data_and_the_forward_pass_continues(kind: type[Recorder]) -> None:
    """A removed module is no longer recorded; the others move up and are still recorded."""
    net = network()
    recorder = kind().children(net)
    train(net, batch())
    gone = recorder.data[1]
    assert recorder.remove(1) is gone
    train(net, batch())
    assert (len(gone), recorder.names, [len(each) for each in recorder]) == (1, ["0", "2"], [2, 2])
    assert len(recorder.handles) == len(recorder.subrecorders) == 2
    recorder.remove("0")
    recorder.remove(0)
    assert (len(recorder), hooks_on(net)) == (0, [])


def test_a_handle_takes_the_hooks_of_one_module_off() -> None:
    """A module whose handle was removed is no longer recorded but keeps its data."""
    net = network()
    recorder = ForwardPre().children(net)
    train(net, batch())
    recorder.handles[1].remove()
    train(net, batch())
    assert [len(each) for each in recorder] == [2, 1, 2]


@each_kind
def test_no_hook_is_left_after_the_block(kind: type[Recorder]) -> None:
    """Leaving a ``with`` block removes all hooks and keeps the data; entering it again continues recording."""
    net = network()
    recorder = kind().modules(net)
    for _ in range(2):
        with recorder:
            train(net, batch())
        assert hooks_on(net) == []
        train(net, batch())
    assert [len(each) for each in recorder] == [2, 2, 2, 2]


# Changing the data.


@each_kind
def test_apply_changes_what_is_stored(kind: type[Recorder]) -> None:
    """The function receives the data of each module, and its result replaces them."""
    net = network()
    recorder = kind(reduction=torch.add).children(net)
    train(net, batch(4), batch(4))
    means = [data / 8 for data in recorder]
    recorder.apply_sample(lambda data, samples: data / samples)
    assert equal(recorder.data, means)
    recorder.apply(lambda data: data.sum())
    assert equal(recorder.data, [each.sum() for each in means])


def test_apply_of_a_list() -> None:
    """Without a reduction the function receives the list of all tensors."""
    net = network()
    with ForwardOutput().children(net) as recorder:
        train(net, batch(4), batch(2))
    recorder.apply(torch.cat)
    assert [tuple(each.shape) for each in recorder] == [(6, 2), (6, 2), (6, 1)]


def test_recording_continues_after_apply_of_a_function() -> None:
    """With a two-argument function, the next tensor is reduced into the result of ``apply``."""
    net = nn.Identity()
    recorder = ForwardOutput(reduction=torch.add).modules(net)
    net(torch.tensor([1.0]))
    recorder.apply(lambda data: data * 100)
    net(torch.tensor([5.0]))
    assert recorder[0].tolist() == [105.0]


def test_apply_of_a_reduction_ends_it() -> None:
    """After ``apply`` on a Reduction's result, a tensor causes a warning that names the module and the remedy."""
    net = nn.Identity()
    recorder = ForwardOutput(reduction=RunningMoments).modules(net)
    net(torch.tensor([1.0, 3.0]))
    recorder.apply(lambda data: float(data["mean"]))
    with pytest.warns(
        RecorderWarning, match=r"module '' at 'out': .*replaced, by apply\(\) .*: reset\(\) starts again"
    ):
        net(torch.ones(1))
    assert recorder[0] == 2.0


def test_reset_begins_anew() -> None:
    """``reset`` clears data and counts, returns the bytes of lists, and keeps modules and hooks."""
    net = nn.Identity()
    recorder = ForwardOutput(max_bytes=8).modules(net)
    for _ in range(3):
        net(torch.ones(2))
        assert (len(recorder[0]), recorder.samples(0), recorder.calls(0)) == (1, 2, 1)
        recorder.reset()
        assert (recorder[0], recorder.samples(0), recorder.calls(0)) == ([], 0, 0)


# Files.

REDUCTIONS: dict[str, Any] = {
    "list": None,
    "function": lambda total, new: total + new.sum(0),
    "Reduction": RunningMoments,
    "Metric": torchmetrics.MeanMetric,
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@each_kind
def test_what_was_saved_can_be_loaded(kind: type[Recorder], reduction: Any, tmp_path: Path) -> None:
    """A folder has one numbered file of data per module, and a recorder that loads it continues from there."""
    net = network()
    recorder = kind(reduction=reduction).children(net)
    train(net, batch(4))
    recorder.save(tmp_path / "analysis", mkdir=True)
    assert sorted(each.name for each in (tmp_path / "analysis").iterdir()) == ["0.pt", "1.pt", "2.pt"]
    for index, data in enumerate(recorder):
        assert equal(torch.load(tmp_path / "analysis" / f"{index}.pt", weights_only=True), data)
    recorder.detach()

    again = kind(reduction=reduction).children(net)
    again.load(tmp_path / "analysis")
    assert equal(again.data, recorder.data)
    assert [again.samples(2), again.calls(2)] == [4, 1]
    recorder.attach()
    train(net, batch(2))
    assert equal(again.data, recorder.data)
    assert [again.samples(2), again.calls(2)] == [6, 2]


def test_the_tensors_are_saved_by_name(tmp_path: Path) -> None:
    """The safetensors file beside the folder has each tensor under its module's name and path."""
    from safetensors.torch import load_file

    net = nn.Sequential(nn.Linear(3, 2), Nested())
    with ForwardOutput().select(net) as outputs, ForwardPre(reduction=torch.add).select(net, "0") as inputs:
        net[1](net[0](torch.ones(4, 3)), extra={"bias": torch.zeros(4, 2)})
    outputs.save(tmp_path / "out", mkdir=True)
    inputs.save(str(tmp_path / "in"), mkdir=True)
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["0/0", "1/out.parts[0]/0", "1/out.sum/0"]
    assert sorted(load_file(tmp_path / "in.safetensors")) == ["0/in[0]"]


@pytest.mark.parametrize("name", ["a/b", "a_b"])
def test_names_that_look_alike_in_a_file_stay_apart(name: str, tmp_path: Path) -> None:
    """Modules whose names differ only in a slash are both loaded correctly."""
    net = nn.ModuleDict({"a_b": nn.Identity()})
    net._modules["a/b"] = nn.Identity()  # as a user's own __setattr__ may do
    recorder = ForwardOutput(reduction=torch.add).children(net)
    for value, each in enumerate(net.values()):
        each(torch.full((1,), float(value)))
    recorder.save(tmp_path / "x", mkdir=True)
    again = ForwardOutput(reduction=torch.add).children(net)
    again.load(tmp_path / "x")
    assert again[name].tolist() == recorder[name].tolist()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Saving to a missing folder raises an error with the remedy; arguments of mkdir are passed on."""
    recorder = ForwardPre().children(network())
    with pytest.raises(FileNotFoundError, match="mkdir=True creates it"):
        recorder.save(tmp_path / "a" / "b")
    recorder.save(tmp_path / "a" / "b", mkdir=True, parents=True)
    with pytest.raises(FileExistsError):
        recorder.save(tmp_path / "a" / "b", mkdir=True)
    recorder.save(tmp_path / "a" / "b", mkdir=True, exist_ok=True)


def test_a_file_of_other_modules_is_refused(tmp_path: Path) -> None:
    """Loading data of other modules raises an error with both lists and changes nothing."""
    net = network()
    with ForwardPre().children(net) as recorder:
        train(net, batch())
    recorder.save(tmp_path, exist_ok=True)
    other = ForwardPre().children(net, types=nn.Linear)
    with pytest.raises(ArgumentError, match=r"modules \['0', '1', '2'\], this recorder has \['0', '2'\]"):
        other.load(tmp_path)
    assert other.data == [[], []]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """A damaged file, a dump and a missing file raise their own errors, and a dump reader rejects a recording."""
    recorder = ForwardPre().children(network())
    with pytest.raises(FileNotFoundError):
        recorder.load(tmp_path / "missing")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DumpError, match="not a readable safetensors file"):
        recorder.load(tmp_path / "broken")
    recorder.save(tmp_path / "good", mkdir=True)
    with pytest.raises(DumpError, match=r"has the format 'lightning_recorder\.recording/1'; the supported format"):
        read_dump(tmp_path / "good.safetensors")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Loading data of another kind of recorder or reduction raises an error that names the kind."""
    net = network()
    with ForwardPre().children(net) as recorder:
        train(net, batch())
    recorder.save(tmp_path / "x", mkdir=True)
    with pytest.raises(ArgumentError, match="saved by a ForwardPre, and cannot be loaded by a ForwardOutput"):
        ForwardOutput().children(net).load(tmp_path / "x")
    for reduction in (RunningMoments, torchmetrics.MeanMetric):
        with pytest.raises(ArgumentError, match=r"parts \['0'\], which belong to another kind of reduction"):
            ForwardPre(reduction=reduction).children(net).load(tmp_path / "x")


def test_a_state_is_plain(tmp_path: Path) -> None:
    """The state of a recorder has only containers, numbers and tensors, so it loads with ``weights_only``."""
    net = network()
    with ForwardPre().modules(net) as recorder:
        train(net, batch())
    torch.save(recorder.state_dict(), tmp_path / "state.pt")
    again = ForwardPre().modules(net)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert equal(again.data, recorder.data)


# Training is unaffected.


@each_kind
def test_a_state_survives_inference_mode(kind: type[Recorder]) -> None:
    """Data recorded in inference mode can be reduced further outside of it, even by an in-place function."""
    net = network()
    recorder = kind(reduction=lambda total, new: total.add_(new), strict=True).children(net)
    with torch.inference_mode():
        net(batch().detach())
    train(net, batch())
    forward = kind in (ForwardPre, ForwardInput, ForwardOutput)
    assert [recorder.calls(each) for each in range(3)] == [2 if forward else 1] * 3
    assert not any(data.is_inference() or data.requires_grad for data in recorder)


def test_a_reduction_computes_in_full_precision() -> None:
    """Under the model's autocast, reductions are not computed in half precision."""
    net = nn.Identity()
    recorder = ForwardOutput(reduction=lambda total, new: total @ new).modules(net)
    x = torch.eye(2) + torch.tensor([[0.0, 1e-3], [1e-3, 0.0]])
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            net(x)
    assert torch.equal(recorder[0], x @ x)


def test_a_fault_of_the_reduction_costs_its_module() -> None:
    """A reduction that raises causes one warning that names the module and keeps its data; strict mode raises."""
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    recorder = ForwardOutput(reduction=torch.add).children(net)
    net(torch.ones(2, 3))
    with pytest.warns(RecorderWarning) as told:
        forward(net, torch.ones(5, 7), 2)
    assert [str(each.message).partition(":")[0] for each in told] == [
        "OutputTap could not record module '0' at 'out'",
        "OutputTap could not record module '1' at 'out'",
    ]
    assert [(tuple(data.shape), recorder.samples(place)) for place, data in enumerate(recorder)] == [((2, 3), 2)] * 2
    strict = ForwardOutput(reduction=torch.add, strict=True).children(net, indices=1)
    net(torch.ones(2, 3))
    with pytest.raises(RecordingError, match="module '1'"):
        net(torch.ones(5, 7))
    strict.detach()


def test_a_smaller_last_batch_is_left_out() -> None:
    """A batch that the reduction cannot add costs one warning with the way out; what was recorded stays and goes on."""
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    with ForwardOutput(reduction=lambda x, y: x + y).children(net, indices=0) as recorder:
        forward(net, torch.ones(8, 3), 2)
        with pytest.warns(RecorderWarning) as told:
            forward(net, torch.ones(5, 3), 2)
        forward(net, torch.ones(8, 3), 1)
    (warning,) = told
    assert str(warning.message) == (
        "module '0': the reduction cannot combine its result of shape (8, 3) with a batch of shape (5, 3): sum the "
        "rows first, as in lambda total, new: total.sum(0, keepdim=True) + new.sum(0, keepdim=True), or set "
        "drop_last=True in the DataLoader. Such a batch is left out; strict=True raises instead."
    )
    assert (recorder.failed, recorder.samples(0), recorder.calls(0)) == ([], 24, 3)
    assert torch.equal(recorder[0], torch.full((8, 3), 3.0))


def test_the_way_out_of_a_smaller_last_batch() -> None:
    """The function that the message suggests adds all rows, and strict mode raises where the other one fails."""
    net = nn.Identity()
    summed = ForwardOutput(reduction=lambda total, new: total.sum(0, keepdim=True) + new.sum(0, keepdim=True))
    with summed.modules(net), ForwardOutput(reduction=torch.add, strict=True).modules(net) as strict:
        net(torch.ones(8, 3))
        with pytest.raises(RecordingError, match=r"cannot combine its result of shape \(8, 3\)"):
            net(torch.ones(5, 3))
    with summed:
        net(torch.ones(5, 3))
    assert torch.equal(strict[0], torch.ones(8, 3))
    assert summed[0].sum(0).tolist() == [8.0 + 5 + 5] * 3


def test_the_first_sample_can_be_recorded_alone() -> None:
    """With ``data_method="sample"`` the first sample of each tensor is recorded, and counts as one."""
    net = nn.Identity()
    with ForwardOutput(reduction=torch.add, data_method="sample").modules(net) as recorder:
        for rows in (8, 5):
            net(torch.arange(float(rows)).reshape(rows, 1) + 1)
        net(torch.tensor(3.0))
    assert (recorder[0].tolist(), recorder.samples(0), recorder.calls(0)) == ([5.0], 3, 3)


def test_what_has_failed_is_named_and_begins_anew_after_reset() -> None:
    """A module whose reduction raised is among the failed ones, and is recorded again after ``reset``."""
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    recorder = ForwardOutput(reduction=torch.add).children(net)
    net(torch.ones(2, 3))
    assert recorder.failed == []
    with pytest.warns(RecorderWarning):
        net(torch.ones(5, 7))
    assert recorder.failed == ["0", "1"]
    recorder.reset()
    net(torch.ones(5, 7))
    assert (recorder.failed, [tuple(data.shape) for data in recorder]) == ([], [(5, 7)] * 2)


def test_a_recorder_says_what_it_is_of() -> None:
    """The text of a recorder has its class and its modules."""
    assert repr(ForwardPre().children(network(), types=nn.Linear)) == "ForwardPre of 2 modules: '0', '2'"


def test_a_fault_of_the_condition_costs_its_module() -> None:
    """A condition that raises causes one warning that names the module."""
    net = nn.Identity()
    ForwardOutput(condition=lambda: 1 / 0).modules(net)
    with pytest.warns(RecorderWarning, match="module '': ZeroDivisionError"):
        net(torch.ones(1))


@pytest.mark.parametrize(
    "wrong", [{"condition": True}, {"reduction": "mean"}, {"max_bytes": 0}, {"data_method": "rows"}]
)
def test_wrong_arguments_are_refused_at_construction(wrong: dict[str, Any]) -> None:
    """Invalid arguments raise before any module is changed."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        ForwardPre(**wrong)


class Owner(nn.Module):
    """A model with a recorder of its layers as an attribute."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.layers = network()
        self.recorder = recorder.children(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@each_kind
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_model_that_owns_its_recorder_can_be_copied(
    kind: type[Recorder], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    """A copy of a model with its recorder attached works, records nothing, and does not affect the original."""
    net = Owner(kind(reduction=torch.add))
    train(net, batch())
    twin = duplicate(net)
    assert isinstance(twin, Owner)
    assert equal(twin.recorder.data, net.recorder.data)
    train(twin, batch())
    assert [twin.recorder.calls(0), net.recorder.calls(0)] == [1, 1]
    twin.recorder.attach()
    train(twin, batch())
    assert [twin.recorder.calls(0), net.recorder.calls(0)] == [2, 1]


# No synchronization, no growth.


class NoWaiting(TorchDispatchMode):
    """A mode that fails if a value is copied to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@each_kind
@pytest.mark.parametrize("reduction", [None, torch.add, RunningMoments], ids=["list", "function", "Reduction"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recording_waits_for_nothing(kind: type[Recorder], reduction: Any, device: str) -> None:
    """No value is read on the host during a recorded step, and tensors without values are recorded as well."""
    net, x = network().to(device), batch().detach().to(device).requires_grad_()
    recorder = kind(reduction=reduction, strict=True).modules(net)
    with NoWaiting():
        train(net, x, x)
    assert [recorder.calls(each) for each in range(4)] == [2] * 4


STEPS = """
import resource, torch
from torch import nn
from lightning_recorder import BackwardInput, BackwardOutput, ForwardInput, ForwardOutput, ForwardPre
from lightning_recorder.reductions import RunningMoments

net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
for kind in (ForwardPre, ForwardInput, ForwardOutput, BackwardInput, BackwardOutput):
    for reduction in (lambda last, new: new[0], torch.add, RunningMoments):
        kind(reduction=reduction, strict=True).modules(net)
for step in range(60):
    net(torch.ones(256, 512, requires_grad=True)).sum().backward()
    if step in (20, 59):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    """In 60 steps with 15 recorders a process's peak memory grows by less than the size of one step's tensors."""
    early, late = map(int, forks.output_of("-c", STEPS, folder=tmp_path).split())
    # One tensor of a step has 512 KiB: kept at each step by a single recorder, that would add 19 MiB.
    assert late - early < 16 * 1024


@each_kind
def test_a_list_is_as_large_as_its_limit(kind: type[Recorder]) -> None:
    """Without a reduction memory grows to max_bytes and no further, however long the run."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    limit = 100 * 32 * 64 * 4  # a hundred tensors
    with kind(max_bytes=limit).children(net) as recorder, pytest.warns(RecorderWarning, match="max_bytes"):
        train(net, *(torch.ones(32, 64, requires_grad=True) for _ in range(50)))
    assert sum(each.nbytes for data in recorder for each in data) == limit
