"""Who called a function of torch."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from lightning_recorder.graph.caller import Caller, CustomCall, find_caller
from tests.graph.nets import Net, X

# Who called.


def calling(
    module: str, inner: Callable[[], Caller], name: str = "step", *, file: str = "nowhere.py"
) -> Callable[[], Caller]:
    """A function that lies in a module of that name, in the second line of that file, and calls another."""
    globals_: dict[str, Any] = {"__name__": module, "inner": inner}
    exec(compile(f"\ndef {name}(): return inner()", file, "exec"), globals_)
    function: Callable[[], Caller] = globals_[name]
    return function


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ("lightning.pytorch.loops.optimization.automatic", True),
        ("lightning.fabric.utilities.apply_func", True),
        ("pytorch_lightning.core.module", True),
        ("lightning_fabric.plugins.precision.amp", True),
        ("torch.optim.adam", True),
        ("torch.amp.grad_scaler", True),
        ("lightning.pytorch.demos.transformer", False),
        ("pytorch_lightning.demos.boring_classes", False),
        ("__main__", False),
        ("my.models", False),
        ("lightning_models.gan", False),
        ("lightningmodels", False),
        ("torchvision.models.resnet", False),
        ("transformers.models.bert.modeling_bert", False),
    ],
)
def test_the_module_of_the_caller_decides(module: str, trainer: bool) -> None:
    """Lightning, torch's optimisers and its gradient scaler are trainers; models are everything else."""
    assert calling(module, find_caller)().trainer is trainer


def test_torch_in_between_does_not_count() -> None:
    """What torch, the standard library or this package does on the way is not the caller."""
    inner: Callable[[], Caller] = find_caller
    for module in ("torch.nn.functional", "torch.overrides", "contextlib", "functools", "lightning_recorder.graph"):
        inner = calling(module, inner)
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False


def test_the_nearest_caller_decides() -> None:
    """A model that Lightning calls is a model, and an optimiser that a model calls no model."""
    assert calling("lightning.pytorch.loops", calling("my.models", find_caller))().trainer is False
    assert calling("my.models", calling("torch.optim.sgd", find_caller))().trainer is True


def test_averaged_model() -> None:
    """The forward pass of torch's averaged model is a model's, the averaging is not."""
    assert calling("torch.optim.swa_utils", find_caller, "forward")().trainer is False
    assert calling("torch.optim.swa_utils", find_caller, "update_parameters")().trainer is True


def test_function_modes_in_between() -> None:
    """A function mode of the user's stands between a function and who called it."""
    inner = calling("my.modes", find_caller, "__torch_function__")
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False


# Where it was called.


def test_line_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is the line that called, by the path of its file from the working directory."""
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "models" / "net.py")
    assert calling("my.models", find_caller, file=file)().source == "models/net.py:2"


def test_line_of_this_file() -> None:
    """Of a function that runs as it stands in a file, that line is the source."""
    here = inspect.currentframe()
    assert here is not None
    source, line = find_caller().source, here.f_lineno
    assert source == f"{os.path.relpath(__file__)}:{line}".replace("\\", "/")


def test_file_outside_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that lies elsewhere has its whole path, since one that climbs says nothing."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = str(tmp_path / "elsewhere.py")
    assert calling("my.models", find_caller, file=file)().source == f"{file}:2"


@pytest.mark.parametrize(
    "folder",
    ["/usr/lib/python3/dist-packages/", "/venv/lib/site-packages/", "C:\\venv\\Lib\\site-packages\\"],
    ids=["dist-packages", "site-packages", "on Windows"],
)
def test_installed_file(folder: str) -> None:
    """A file of an installed package is named from the package on, the same on every machine."""
    separator = "\\" if "\\" in folder else "/"
    file = folder + separator.join(("bert", "modeling.py"))
    assert calling("bert.modeling", find_caller, file=file)().source == "bert/modeling.py:2"


def test_source_of_a_trainer() -> None:
    """What the trainer calls has no source, though a model's code lies further out."""
    assert calling("my.models", calling("torch.optim.sgd", find_caller))().source == ""


def test_source_behind_torch_and_this_package() -> None:
    """Lines of torch, and of this package itself, are passed over on the way to the model's."""
    inner: Callable[[], Caller] = find_caller
    for module in ("torch.nn.functional", "lightning_recorder.graph.capture", "torch.nn.modules.module"):
        inner = calling(module, inner, file="inside.py")
    assert calling("my.models", inner, file="net.py")().source == "net.py:2"


# Functions with a gradient of their own.


class Looking(Function):
    """Keeps who called a function inside of it, then does what it is told to."""

    apply: ClassVar[Any]
    seen: ClassVar[list[Caller]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        Looking.seen.append(find_caller())
        return x * 2 if then is None else then(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Around(Function):
    """Applies another one."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return Looking.apply(Looking.apply(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.fixture
def seen() -> list[Caller]:
    """Who called inside the function, in the order of time."""
    Looking.seen.clear()
    return Looking.seen


def custom(caller: Caller) -> CustomCall:
    """The call of a function, which there must be."""
    assert caller.custom is not None
    return caller.custom


def test_inside_a_function(seen: list[Caller]) -> None:
    """Inside an ``autograd.Function`` its call is known by its class and arguments, from the line of ``apply``."""
    here = inspect.currentframe()
    assert here is not None
    Looking.apply(X)
    line = here.f_lineno - 1
    (caller,) = seen
    assert custom(caller).function is Looking
    assert custom(caller).arguments[0][0] is X
    assert custom(caller).depth == 1
    assert caller.source == f"{os.path.relpath(__file__)}:{line}".replace("\\", "/")


def test_outside_of_a_function(seen: list[Caller]) -> None:
    """Neither before nor after is there a call of one."""
    Looking.apply(X)
    assert len(seen) == 1
    assert find_caller().custom is None


def test_inside_nested_functions(seen: list[Caller]) -> None:
    """Of nested functions the outermost is the one, the same for all that happens inside, with the number of them."""
    Around.apply(X)
    assert [(custom(caller).function, custom(caller).depth) for caller in seen] == [(Around, 2), (Around, 2)]
    assert len({custom(caller).frame for caller in seen}) == 1


def test_a_module_inside_a_function(seen: list[Caller]) -> None:
    """What a module does that a function calls is the module's."""
    found: list[Caller] = []

    def forward(_: Net, x: Tensor) -> Tensor:
        found.append(find_caller())
        return x

    module: nn.Module = Net(forward)
    Looking.apply(X, module)
    assert [caller.custom for caller in found] == [None]
    assert len(seen) == 1


def test_a_function_inside_a_module(seen: list[Caller]) -> None:
    """A function that a module applies is found, also where the module is called by another function."""
    module: nn.Module = Net(lambda _, x: Around.apply(x))
    Looking.apply(X, module)
    assert [custom(caller).function for caller in seen] == [Looking, Around, Around]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_is_no_function(seen: list[Caller], reentrant: bool) -> None:
    """A checkpoint is a part of the model, however it is made; a function applied inside is found."""
    found: list[Caller] = []

    def block(x: Tensor) -> Any:
        found.append(find_caller())
        return Looking.apply(x)

    checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert [caller.custom for caller in found] == [None]
    assert [custom(caller).function for caller in seen] == [Looking]


def test_a_trainer_around_a_function(seen: list[Caller]) -> None:
    """What happens inside a function that the trainer applies is the trainer's."""
    calling("lightning.pytorch.loops", partial(Looking.apply, X))()
    assert [(caller.trainer, caller.source) for caller in seen] == [(True, "")]
