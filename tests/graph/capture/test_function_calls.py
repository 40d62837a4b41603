"""The caller of a torch function."""

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

from lightning_recorder.graph.capture.function_calls import Caller, CustomCall, find_caller, installed_packages
from tests.graph.nets import Net, X

# The caller.


def calling(
    module: str, inner: Callable[[], Caller], name: str = "step", *, file: str = "nowhere.py"
) -> Callable[[], Caller]:
    """Return a function that calls another one, from the second line of a given file in a given module."""
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
    """Lightning, torch's optimizers and its gradient scaler are trainers; all other code belongs to the model."""
    assert calling(module, find_caller)().trainer is trainer


def test_torch_in_between_does_not_count() -> None:
    """Frames of torch, the standard library and this package between the caller and the function are ignored."""
    inner: Callable[[], Caller] = find_caller
    for module in ("torch.nn.functional", "torch.overrides", "contextlib", "functools", "lightning_recorder.graph"):
        inner = calling(module, inner)
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False


def test_the_nearest_caller_decides() -> None:
    """A model called by Lightning is a model, and an optimizer called by a model is not."""
    assert calling("lightning.pytorch.loops", calling("my.models", find_caller))().trainer is False
    assert calling("my.models", calling("torch.optim.sgd", find_caller))().trainer is True


def test_averaged_model() -> None:
    """The forward pass of torch's averaged model belongs to the model; the averaging does not."""
    assert calling("torch.optim.swa_utils", find_caller, "forward")().trainer is False
    assert calling("torch.optim.swa_utils", find_caller, "update_parameters")().trainer is True


def test_function_modes_in_between() -> None:
    """A custom function mode between a function and its caller is ignored."""
    inner = calling("my.modes", find_caller, "__torch_function__")
    assert calling("lightning.pytorch.loops", inner)().trainer is True
    assert calling("my.models", inner)().trainer is False


# The source line.


def test_line_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is the calling line, with the path of its file relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "models" / "net.py")
    assert calling("my.models", find_caller, file=file)().source == "models/net.py:2"


def test_line_of_this_file() -> None:
    """The source of a call in an ordinary file is the line of that call."""
    here = inspect.currentframe()
    assert here is not None
    source, line = find_caller().source, here.f_lineno
    assert source == f"{os.path.relpath(__file__)}:{line}".replace("\\", "/")


def test_file_outside_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file outside of the working directory has its absolute path, since a relative one would be unclear."""
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
    """The path of an installed file starts at its package, so it is the same on every machine."""
    separator = "\\" if "\\" in folder else "/"
    file = folder + separator.join(("bert", "modeling.py"))
    assert calling("bert.modeling", find_caller, file=file)().source == "bert/modeling.py:2"


def test_file_that_pip_has_installed_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pip install --target, a folder of sys.path has packages, and their files have short paths."""
    files = {name: tmp_path / name / "bert" / "modeling.py" for name in ("target", "project")}
    for name, file in files.items():
        file.parent.mkdir(parents=True)
        (tmp_path / name / "bert-1.0.dist-info").mkdir() if name == "target" else None
        monkeypatch.syspath_prepend(str(tmp_path / name))
    found = [calling("bert.modeling", find_caller, file=str(file))().source for file in files.values()]
    assert found == ["bert/modeling.py:2", f"{files['project']}:2"]


def test_the_installed_packages_among_code_lines() -> None:
    """Packages and single modules are told apart from files of the user, from paths and from unknown names."""
    sources = ["numpy/linalg/linalg.py:7", "tests/net.py:3", "net.py:4", "/home/me/net.py:5", "unknown/net.py:6", ""]
    assert installed_packages([*sources, "typing_extensions.py:9"]) == ("numpy", "typing_extensions.py")


def test_source_of_a_trainer() -> None:
    """A call by the trainer has no source, even if a frame of the model is further out."""
    assert calling("my.models", calling("torch.optim.sgd", find_caller))().source == ""


def test_source_behind_torch_and_this_package() -> None:
    """Lines of torch and of this package are skipped in the search for the model's line."""
    inner: Callable[[], Caller] = find_caller
    for module in ("torch.nn.functional", "lightning_recorder.graph.capture.graph_capture", "torch.nn.modules.module"):
        inner = calling(module, inner, file="inside.py")
    assert calling("my.models", inner, file="net.py")().source == "net.py:2"


# Custom functions with their own gradient.


class Looking(Function):
    """Keeps the caller found inside of it, then runs the given function."""

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
    """Applies another function."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return Looking.apply(Looking.apply(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.fixture
def seen() -> list[Caller]:
    """Return the callers found inside the function, in the order of time."""
    Looking.seen.clear()
    return Looking.seen


def custom(caller: Caller) -> CustomCall:
    """Return the custom call of a caller; fail if there is none."""
    assert caller.custom is not None
    return caller.custom


def test_inside_a_function(seen: list[Caller]) -> None:
    """Inside an ``autograd.Function``, its class and arguments are known; the source is the line of ``apply``."""
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
    """There is no custom call before or after an ``autograd.Function``."""
    Looking.apply(X)
    assert len(seen) == 1
    assert find_caller().custom is None


def test_inside_nested_functions(seen: list[Caller]) -> None:
    """The outermost of nested functions counts, with their number; it is the same for everything inside."""
    Around.apply(X)
    assert [(custom(caller).function, custom(caller).depth) for caller in seen] == [(Around, 2), (Around, 2)]
    assert len({custom(caller).frame for caller in seen}) == 1


def test_a_module_inside_a_function(seen: list[Caller]) -> None:
    """The work of a module that a function calls belongs to the module."""
    found: list[Caller] = []

    def forward(_: Net, x: Tensor) -> Tensor:
        found.append(find_caller())
        return x

    module: nn.Module = Net(forward)
    Looking.apply(X, module)
    assert [caller.custom for caller in found] == [None]
    assert len(seen) == 1


def test_a_function_inside_a_module(seen: list[Caller]) -> None:
    """A function that a module applies is found, even if another function calls the module."""
    module: nn.Module = Net(lambda _, x: Around.apply(x))
    Looking.apply(X, module)
    assert [custom(caller).function for caller in seen] == [Looking, Around, Around]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_is_no_function(seen: list[Caller], reentrant: bool) -> None:
    """A checkpoint of either kind is a part of the model; a function applied inside it is found."""
    found: list[Caller] = []

    def block(x: Tensor) -> Any:
        found.append(find_caller())
        return Looking.apply(x)

    checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant)
    assert [caller.custom for caller in found] == [None]
    assert [custom(caller).function for caller in seen] == [Looking]


def test_a_trainer_around_a_function(seen: list[Caller]) -> None:
    """The work inside a function that the trainer applies belongs to the trainer."""
    calling("lightning.pytorch.loops", partial(Looking.apply, X))()
    assert [(caller.trainer, caller.source) for caller in seen] == [(True, "")]
