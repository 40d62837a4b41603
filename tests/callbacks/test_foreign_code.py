"""Code of the user that the training does not call: it may draw, change a buffer or raise, and changes nothing."""

from __future__ import annotations

import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader

from lightning_recorder import Outputs, default_recorders, open_recording

ROOT = str(Path(__file__).parents[2] / "lightning_recorder")


def is_ours() -> bool:
    """Return True if the code around a method of this file was called by the package, directly or through torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path and not path.startswith("<"):
            return path.startswith(ROOT)
        if path == __file__ and frame.f_code.co_name in ("forward", "training_step", "configure_optimizers"):
            return False
        frame = frame.f_back
    return False


def draw(module: Any) -> None:
    """Draw a random number."""
    torch.randn(3)


def write(module: Any) -> None:
    """Change a buffer that the forward pass uses."""
    for each in (vars(module)["_buffers"].values()) if isinstance(module, nn.Module) else ():
        each.add_(0.5)


def fail(module: Any) -> None:
    """Raise what nobody expects."""
    raise KeyError("foreign")


def leave(module: Any) -> None:
    """End the program."""
    raise SystemExit(3)


def write_values(mapping: Any) -> None:
    """Change the tensor that the mapping contains."""
    mapping.value.add_(1)


HARMS: dict[str, Callable[[Any], None]] = {"draws": draw, "writes": write, "raises": fail, "exits": leave}


def hostile(method: str, harm: Callable[[Any], None]) -> nn.Module:
    """Return a layer that does harm in one method when the package calls it."""
    base: Any = getattr(nn.Linear, method, None)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours():
            harm(self)
        if method == "extra_repr":
            return "foreign"
        if base is None:
            raise AttributeError(args[0] if args else method)
        return base(self, *args, **kwargs)

    value: Any = property(called) if method in ("running_mean", "weight_mask", "kernel_size") else called
    kind = type("Hostile", (Layer,), {method: value})
    if method == "__eq__":
        setattr(kind, "__hash__", nn.Module.__hash__)  # noqa: B010 - a class that defines __eq__ has no hash
    made: nn.Module = kind()
    return made


class Layer(nn.Linear):
    """A linear layer with a buffer and noise."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2) + self.get_buffer("shift")


METHODS = (
    "extra_repr",
    "__repr__",
    "__getattr__",
    "__hash__",
    "__eq__",
    "named_parameters",
    "parameters",
    "named_buffers",
    "buffers",
    "named_modules",
    "modules",
    "named_children",
    "children",
    "get_submodule",
    "__len__",
    "__bool__",
    "__iter__",
    "__str__",
    "_get_name",
    "__dir__",
    "__deepcopy__",
    "state_dict",
    "register_forward_hook",
    "running_mean",
    "kernel_size",
)


def with_hostile_class(method: str, harm: Callable[[Any], None]) -> nn.Module:
    """Return a layer whose class does harm in one method or attribute of its metaclass when the package calls it."""
    base = vars(type)[method] if method in vars(type) else getattr(object, method)

    def called(cls: type, *args: Any) -> Any:
        if is_ours():
            harm(cls)
        return base(cls, *args)

    def read(cls: type) -> Any:
        if is_ours():
            harm(cls)
        return base.__get__(cls)

    value: Any = called if callable(base) else property(read)
    metaclass = type("Metaclass", (type,), {"__hash__": type.__hash__, method: value})
    layer: nn.Module = metaclass("Hostile", (Layer,), {})()
    return layer


METHODS_OF_CLASSES = ("__getattribute__", "__eq__", "__hash__", "__repr__", "__name__", "__module__", "__mro__")


def hostile_table(harm: Callable[[Any], None], base: type) -> type:
    """Return a class of dictionaries that does harm in each of its methods when the package calls it."""

    def method(name: str) -> Any:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ours():
                harm(self)
            return getattr(base, name)(self, *args, **kwargs)

        return called

    return type("Table", (base,), {name: method(name) for name in TABLE_METHODS})


TABLE_METHODS = (
    *("__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__", "clear", "copy", "get"),
    *("items", "keys", "pop", "setdefault", "update", "values"),
)


def with_tables(harm: Callable[[Any], None]) -> list[nn.Module]:
    """Return blocks whose tables of parameters, buffers and modules, and an attribute, are of a class of the user."""
    blocks: list[nn.Module] = []
    for base in (dict, OrderedDict):
        table = hostile_table(harm, base)
        block = nn.Sequential(Layer(), nn.Linear(6, 6))
        for each in (block, *block):
            for name in ("_parameters", "_buffers", "_modules"):
                vars(each)[name] = table(vars(each)[name])
            vars(each)["cache"] = table(layer=nn.Linear(6, 6))
        blocks.append(block)
    return blocks


class Answer(Mapping[str, Any]):
    """An output that does harm when its items are read."""

    def __init__(self, harm: Callable[[Any], None] | None, value: Tensor) -> None:
        self.harm, self.value = harm, value

    def __getitem__(self, key: str) -> Any:
        if self.harm is not None and is_ours():
            self.harm(self)
        return self.value

    def __iter__(self) -> Iterator[str]:
        return iter(["value"])

    def __len__(self) -> int:
        return 1


class Answering(nn.Linear):
    """A layer whose output is a mapping."""

    def __init__(self, harm: Callable[[Any], None] | None) -> None:
        super().__init__(6, 6)
        self.harm = harm

    def forward(self, x: Tensor) -> Any:
        return Answer(self.harm, super().forward(x))


class Labeled(Tensor):
    """A tensor with labels, which its methods need and a new tensor of the class does not have."""

    labels: tuple[str, ...]

    @property
    def shape(self) -> Any:  # type: ignore[override]  # torch has an attribute
        if len(self.labels):
            return super().shape
        return None

    def detach(self) -> Any:
        found: Any = super().detach()
        found.labels = self.labels
        return found


class Labeling(nn.Linear):
    """A layer that returns a tensor with labels."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Any = super().forward(x).as_subclass(Labeled)
        found.labels = ("a",)
        labeled: Tensor = found
        return labeled


class Task(LightningModule):
    """Layers in a row, with noise."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.layers = nn.ModuleList(layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = nn.functional.dropout(self.first(batch), 0.1)
        for layer in self.layers:
            y: Any = layer(x)
            x = y["value"] if isinstance(y, Answer) else y.as_subclass(Tensor)
        loss: Tensor = self.last(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in (*self._own(),) if each.requires_grad], lr=0.05)

    def _own(self) -> Iterator[nn.Parameter]:
        for module in (self.first, self.last, *self.layers):
            yield from nn.Module.parameters(module)


def fit(make: Callable[[], list[nn.Module]], folder: Path | None) -> tuple[dict[str, Tensor], Tensor]:
    """Train for four steps, all of them recorded if a folder is given; return the state and a random number."""
    seed_everything(1, verbose=False)
    task = Task(*make())
    recorders: list[Callback] = []
    if folder:
        recorders += default_recorders(every_n_train_steps=1, outputs=Outputs(report=False), costs=True, spectra=True)
    trainer = Trainer(
        max_steps=4,
        logger=CSVLogger(folder, name="", version="") if folder else False,
        accelerator="cpu",
        callbacks=recorders,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(task, DataLoader(list(torch.randn(8, 6)), batch_size=2))  # type: ignore[arg-type]  # a list is fine
    return dict(nn.Module.state_dict(task)), torch.rand(1)


def assert_equal(one: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor]) -> None:
    """Compare two fits bit by bit."""
    assert one[0].keys() == other[0].keys()
    differing = [name for name in one[0] if not torch.equal(one[0][name], other[0][name])]
    assert (differing, torch.equal(one[1], other[1])) == ([], True)


class Watched(Layer):
    """A layer that counts the calls of its methods by the package."""

    calls: ClassVar[Counter[str]] = Counter()

    def extra_repr(self) -> str:
        self.calls["extra_repr"] += 1
        return "foreign"

    def __getattribute__(self, name: str) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(ROOT):
            Watched.calls[name] += 1
        return super().__getattribute__(name)


def test_modules_are_read_without_their_code(tmp_path: Path) -> None:
    """A fit with all recorders calls ``extra_repr`` once, and reads no attribute through the code of the class."""
    Watched.calls.clear()
    fit(lambda: [Watched()], tmp_path)
    assert Watched.calls == {"extra_repr": 1}


def recorded(folder: Path) -> dict[str, set[str]]:
    """Return the names of the recorded modules of each recorder."""
    recording = open_recording(folder)
    (run,) = (recording[name] for name in recording)
    return {label: {name for name, _ in run[label].sites} for label in run if label != "watch"}


@pytest.mark.parametrize("harm", HARMS)
def test_foreign_methods_change_nothing(harm: str, tmp_path: Path) -> None:
    """Training is bitwise the same, and every module is recorded, whatever the methods of some layers do."""

    def make() -> list[nn.Module]:
        return [*(hostile(method, HARMS[harm]) for method in METHODS), Layer()]

    assert_equal(fit(make, tmp_path), fit(make, None))
    for names in recorded(tmp_path).values():
        assert {"first", "last", *(f"layers.{number}" for number in range(len(METHODS) + 1))} <= names
    assert (tmp_path / "recorder" / "graph.json").exists()


@pytest.mark.parametrize("harm", [draw, fail])
def test_classes_with_a_metaclass(harm: Callable[[Any], None], tmp_path: Path) -> None:
    """The name, the bases and the methods of a class are read without its metaclass."""

    def make() -> list[nn.Module]:
        return [*(with_hostile_class(method, harm) for method in METHODS_OF_CLASSES), Layer()]

    assert_equal(fit(make, tmp_path), fit(make, None))
    for names in recorded(tmp_path).values():
        assert {"first", "last", *(f"layers.{number}" for number in range(len(METHODS_OF_CLASSES) + 1))} <= names
    assert (tmp_path / "recorder" / "graph.json").exists()


@pytest.mark.parametrize("harm", [draw, fail])
def test_tables_of_a_class_of_the_user(harm: Callable[[Any], None], tmp_path: Path) -> None:
    """The parameters, buffers and submodules of a module are read without the methods of the class of their table."""

    def make() -> list[nn.Module]:
        return with_tables(harm)

    assert_equal(fit(make, tmp_path), fit(make, None))
    for names in recorded(tmp_path).values():
        assert {"first", "last", *(f"layers.{block}.{layer}" for block in (0, 1) for layer in (0, 1))} <= names
    assert (tmp_path / "recorder" / "graph.json").exists()


@pytest.mark.parametrize("harm", [draw, fail, write_values])
def test_mappings_of_the_user(harm: Callable[[Any], None], tmp_path: Path) -> None:
    """Reading the items of an output draws no number, changes no value, and an error costs this module only."""

    def make() -> list[nn.Module]:
        return [Answering(harm), Layer()]

    assert_equal(fit(make, tmp_path), fit(make, None))
    for names in recorded(tmp_path).values():
        assert {"first", "last", "layers.1"} <= names


def test_tensors_of_a_class_whose_methods_need_attributes(tmp_path: Path) -> None:
    """They are recorded like plain tensors."""

    def make() -> list[nn.Module]:
        return [Labeling(), Layer()]

    assert_equal(fit(make, tmp_path), fit(make, None))
    names = recorded(tmp_path)
    assert {"first", "last", "layers.0", "layers.1"} <= names["activations"]
    assert {"first", "last", "layers.0", "layers.1"} <= names["gradients"]


class Counting(nn.Module):
    """A parametrization with a running buffer, as spectral norm has one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        calls = self.get_buffer("calls")
        calls += 1
        return x * (1 + 0.01 * calls)


@pytest.mark.parametrize("kind", [lambda: nn.Linear(6, 6), lambda: parametrizations.spectral_norm(nn.Linear(6, 6))])
def test_parametrized_layers_are_evaluated_by_the_model_only(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The representation of a layer evaluates its bias, and so its parametrization, unless it is read otherwise."""

    def make() -> list[nn.Module]:
        layer = kind()
        parametrize.register_parametrization(layer, "bias", Counting())
        return [layer]

    assert_equal(fit(make, tmp_path), fit(make, None))
