"""The base class of all recorder callbacks: the start and end of a run, its sinks, and copies."""

from __future__ import annotations

import re
import types
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import yaml  # type: ignore[import-untyped]  # its stubs are another package
from torch import nn
from typing_extensions import override

from lightning_recorder import disk
from lightning_recorder.callbacks.arguments import check_compiled, check_name, checked_sinks
from lightning_recorder.callbacks.guard import BATCH_HOOKS, SET_BY_LIGHTNING, GuardedCallback, guarded
from lightning_recorder.callbacks.labels import check_names, labels
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.messages import Silence
from lightning_recorder.callbacks.trainer import (
    claimed_directory,
    exclusive_directory,
    logged_step,
    recorder_directory,
    release_directory,
    running_function,
)
from lightning_recorder.errors import DumpError, check_bool, describe_error, warn
from lightning_recorder.internals.compiled import compiled_modules
from lightning_recorder.internals.module_tree import ModuleSet, takes_hooks
from lightning_recorder.page import summary_html
from lightning_recorder.portable import Lost, Portable, unwrap
from lightning_recorder.recordings import open_recording
from lightning_recorder.sinks import FilesSink, MultiSink, Sink, for_any_thread, sinks_for_loggers
from lightning_recorder.switch import VARIABLE, is_switched_off, setting

__all__ = ["Compiled", "RecorderCallback", "fixed_in_run"]

Owner = TypeVar("Owner", bound="RecorderCallback")

Compiled = Literal["auto", "eager", "inside", "skip"]
"""``"eager"`` runs compiled code eagerly on recorded steps; ``"skip"`` leaves it compiled and does not record it."""


class _Folder(FilesSink):
    """Writes everything except scalars and histograms, because the records have them."""

    write_scalars = Sink.write_scalars
    write_histograms = Sink.write_histograms


class fixed_in_run(Generic[Owner]):  # noqa: N801 - named like the built-in property
    """A property that is computed on each read, except during a run, when its value is cached.

    The cached value is an attribute of the instance, which Python reads without a call. This matters because Lightning
    reads ``state_key`` about six times per step.
    """

    def __init__(self, compute: Callable[[Owner], str]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Owner | None, kind: object = None) -> str:
        if owner is None:  # Lightning reads it from a class that was passed instead of an instance
            return self  # type: ignore[return-value]  # as a property does
        return self._compute(owner)


class RecorderCallback(GuardedCallback):
    """Base class of the callbacks.

    A subclass acquires its resources (hooks, files, sinks) in :meth:`_begin_run` and frees them in :meth:`_release`.
    :meth:`_release` must be idempotent: it is called when the run ends, at teardown and on an exception, in any state.

    A copy or a pickle of a callback keeps the arguments and drops the state of a run. All attributes that belong to a
    run are therefore listed in :meth:`_idle`.

    Args:
        name: A name that distinguishes this callback from others of the same class.
        compiled: ``"eager"`` runs compiled modules and functions eagerly on recorded steps; ``"inside"`` records
            inside compiled modules, if the callback supports it; ``"auto"`` chooses between the two; ``"skip"`` leaves
            compiled code compiled and does not record it.
        sinks: Sinks in addition to the trainer's loggers, such as a :class:`~lightning_recorder.MemorySink`.
        strict: Raise errors of the recorder instead of warning about them.

    Raises:
        ArgumentError: If an argument is invalid.
    """

    group: ClassVar[str]
    """The kind of recording. Callbacks of the same group in one trainer must have different names."""
    _compiled_choices: ClassVar[tuple[str, ...]] = ("eager", "skip")
    """The supported values of ``compiled``."""
    _keeps_state: ClassVar[bool] = False
    """True if checkpoints contain a state of the callback under its ``state_key``."""
    _ignored: ClassVar[Mapping[str, str]] = {}
    """The options of ``schedule`` and ``outputs`` that the callback ignores, each with the code to write instead."""

    _sink: MultiSink | None
    _artifact_sinks: MultiSink | None  # the same sinks, without the fallback folder
    _directory: Path | None
    _function: str
    _began: tuple[int, int] | None
    _lost: tuple[str, ...] = ()
    _resumed: tuple[weakref.ref[Trainer], str] | None

    def __init__(
        self, *, name: str = "", compiled: Compiled = "eager", sinks: Iterable[Sink] = (), strict: bool = False
    ) -> None:
        super().__init__()
        check_bool("strict", strict)
        check_compiled(compiled, self._compiled_choices)
        check_name(name)
        self.name = name
        self.compiled = compiled
        self.strict = strict
        self._own_sinks = checked_sinks(sinks)
        self._enabled = True

    def __str__(self) -> str:
        return type(self).__name__ + (f" {self.name!r}" if self.name else "")

    def _idle(self) -> dict[str, Any]:
        """Return the attributes that belong to a run, with their initial values.

        A constructor sets them last. Copies and unpickled callbacks start with the initial values.
        """
        return {
            "_sink": None,
            "_artifact_sinks": None,
            "_function": "",  # the function of the trainer that is being recorded
            "_began": None,  # the step and the epoch at which training began
            "_trainer": None,  # the trainer of the recorded run
            "_directory": None,  # the folder of the run's recordings
            "_has_warned_of_nested_run": False,
            "_resumed": None,  # the trainer, and the label in the checkpoint that it resumes from
        }

    @abstractmethod
    def _begin_run(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        """Prepare for a run. The model is complete and on its device."""

    def _silences(self, trainer: Trainer, function: str) -> Iterable[Silence]:
        """Return the reasons why a run recorded nothing. Called on rank 0 if no exception ended the run."""
        return ()

    def _skip_modules(
        self, pl_module: LightningModule, modules: dict[str, nn.Module], *, without_hooks: bool = True
    ) -> list[str]:
        """Remove modules that support no hooks, and compiled modules if these are skipped. Return the removed names."""
        compiled = compiled_modules(pl_module) if self.compiled == "skip" else ModuleSet()
        skipped = [
            name
            for name, module in modules.items()
            if module in compiled or (without_hooks and not takes_hooks(module))
        ]
        for name in skipped:
            del modules[name]
        return skipped

    def _rank_zero_directory(self, trainer: Trainer) -> Path | None:
        """Return the folder of the run's recordings on rank 0, and ``None`` on the other ranks."""
        return self._directory if trainer.is_global_zero else None

    def _stay_away(self, trainer: Trainer) -> None:
        """Tell the other ranks that recording is switched off in this process."""

    @property
    def enabled(self) -> bool:
        """True unless :meth:`disable` was called. A disabled callback skips the steps that are due."""
        return self._enabled

    def disable(self) -> None:
        """Stop recording from the next batch on."""
        self._enabled = False

    def enable(self) -> None:
        """Resume recording from the next batch on."""
        self._enabled = True

    def _callbacks_of_group(self, trainer: Trainer) -> list[RecorderCallback]:
        """Return the callbacks of the trainer with the same group. Their labels must be unique."""
        return [each for each in _recorders(trainer) if each.group == self.group]

    def label(self, trainer: Trainer) -> str:
        """Return the label of this callback, which is used in file names and in tags without a module.

        The label is the group followed by the callback's name. Without names, the first callback has the group as its
        label, and the others have the group and a number. Labels are unique within a trainer.
        """
        alike = self._callbacks_of_group(trainer)
        resumed = [each._resumed_label(trainer) for each in alike]
        found = labels(self.group, [each.name for each in alike], resumed)
        return next((label for each, label in zip(alike, found, strict=True) if each is self), self.group)

    def _resumed_label(self, trainer: Trainer) -> str:
        """Return the label of the callback in the run that is resumed, or an empty string if none is known."""
        if self.name or self._resumed is None or self._resumed[0]() is not trainer:
            return ""
        label = self._resumed[1]
        return label if re.fullmatch(rf"{re.escape(self.group)}(-\d+)?", label) else ""

    def _open_sinks(self, trainer: Trainer, directory: Path | None = None) -> None:
        """Open the sinks on rank 0. The folder gets the pictures, texts, graphs and files that no logger can show."""
        if trainer.is_global_zero:
            self._sink = MultiSink(
                sinks_for_loggers(trainer.loggers, known=self._is_from_environment),
                fallback=None if directory is None else _Folder(directory),
                additional=[for_any_thread(sink) for sink in self._own_sinks],
                strict=self.strict,
            )
            self._artifact_sinks = self._sink.without_fallback()

    @guarded
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        disk.begin_run()
        if not is_switched_off():
            check_names(self, _recorders(trainer))

    @guarded
    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "fit")

    @guarded
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "validate")
        self._before_evaluation(trainer)

    @guarded
    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "test")
        self._before_evaluation(trainer)

    @guarded
    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "predict")

    def _before_evaluation(self, trainer: Trainer) -> None:
        """Remove hooks that are for training batches only. Called before validation and test."""

    def _abandon_batch(self, trainer: Trainer, exception: Exception | None) -> None:
        """Remove the hooks of a training batch that failed. Called by a plain loop, which may continue."""
        self._before_evaluation(trainer)

    def _start_run(self, trainer: Trainer, pl_module: LightningModule, function: str) -> None:
        """Start recording a run. A validation inside a fit is not a run of its own."""
        if running_function(trainer) != function or not self._begins_with(function):
            return
        self.__dict__.pop("state_key", None)  # cached by a run that has not ended
        self._show_hooks()
        self._release(trainer)
        self._function, self._began = "", None
        self._trainer, self._has_warned_of_nested_run = weakref.ref(trainer), False
        if self._lost and trainer.is_global_zero:
            warn(f"{self} is a copy without {', '.join(self._lost)}, which cannot be pickled")
        find = exclusive_directory if self._is_from_environment else recorder_directory
        directory = find(trainer) if trainer.world_size > 1 or not is_switched_off() else None
        directory = claimed_directory(trainer, directory, self)
        if is_switched_off():
            self._say_switched_off(trainer)
            self._stay_away(trainer)
        else:
            self._directory = directory
            self._begin_run(trainer, pl_module, directory)
            self._function = function
            self.__dict__["state_key"] = self.state_key

    def _say_switched_off(self, trainer: Trainer) -> None:
        """Log that the recorders are switched off, once per trainer."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        if next(each for each in callbacks if isinstance(each, RecorderCallback)) is self:
            rank_zero_info(f"{VARIABLE}={setting()} in the environment: nothing is recorded")

    @guarded
    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = logged_step(trainer), trainer.current_epoch

    @guarded
    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @guarded
    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._end(trainer)
        except Exception as error:  # noqa: BLE001 - even with strict, the user's exception must not be replaced
            self._release(None)
            warn(f"{self} could not write all of its records: {describe_error(error)}")

    @guarded
    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer)

    def _report_silences(self, trainer: Trainer) -> None:
        """Report why the run recorded nothing: as a warning if the user can fix it, otherwise in the log."""
        function, self._function = self._function, ""
        if not function or trainer.interrupted or not trainer.is_global_zero:
            return
        for silence in self._silences(trainer, function):
            if silence.fix:
                warn(f"{self} {silence.what}: {silence.why}. {silence.fix}")
            else:
                rank_zero_info(f"{self} {silence.what}: {silence.why}")

    def _end(self, trainer: Trainer) -> None:
        try:
            self._report_silences(trainer)
            self._release(trainer)
        finally:
            release_directory(trainer, self)
            self._trainer = None
            for name in (*SET_BY_LIGHTNING, "state_key"):
                self.__dict__.pop(name, None)
            self._show_hooks()
            sink, self._sink, self._artifact_sinks = self._sink, None, None
        if sink is not None:
            sink.flush()
            sink.replay()

    def _repr_html_(self) -> str | None:
        """Return an HTML summary of the recorded run for a notebook, or ``None`` if nothing is recorded yet."""
        if self._directory is None:
            return None
        log_dir = self._directory.parent
        try:
            return summary_html(open_recording(log_dir).runs, f"open_recording({str(log_dir)!r}).page()")
        except DumpError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        of_a_run = {*self._idle(), *SET_BY_LIGHTNING, "state_key"}
        of_a_run |= {name for name in BATCH_HOOKS if vars(self).get(name, self) is None}
        state = {name: each for name, each in vars(self).items() if name not in of_a_run}
        return {**state, "_own_sinks": [Portable(sink, "sinks") for sink in self._own_sinks]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        sinks = [unwrap(sink) for sink in state["_own_sinks"]]
        self._own_sinks = [sink for sink in sinks if isinstance(sink, Sink)]
        self._lose(sinks)
        self.__dict__.update(self._idle())

    def _lose(self, values: Iterable[object]) -> None:
        """Keep the objects that could not be pickled."""
        lost = [value.what for value in values if isinstance(value, Lost)]
        if lost:
            self._lost = (*self._lost, *lost)


def _recorders(trainer: Trainer) -> list[RecorderCallback]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    return [each for each in callbacks if isinstance(each, RecorderCallback)]


def _represent(dumper: Any, callback: Any) -> Any:
    """Represent a callback in YAML, with ``str()`` of each attribute that YAML cannot represent.

    Lightning writes hyperparameters as YAML, which can include callbacks, and handles no error other than TypeError.
    """
    state = {name: each if _is_representable(each) else str(each) for name, each in callback.__getstate__().items()}
    kind = type(callback)
    return dumper.represent_mapping(f"tag:yaml.org,2002:python/object:{kind.__module__}.{kind.__qualname__}", state)


def _represent_portable(dumper: Any, portable: Portable) -> Any:
    is_named = isinstance(portable.value, (types.FunctionType, types.BuiltinFunctionType, type))
    return (
        dumper.represent_data(portable.value) if is_named and portable.is_plain else dumper.represent_str(str(portable))
    )


def _is_representable(value: object) -> bool:
    try:
        yaml.dump(value)
    except Exception:  # noqa: BLE001 - PyYAML raises any error, such as AttributeError for a torch.dtype
        return False
    return True


yaml.add_multi_representer(RecorderCallback, _represent)
yaml.add_multi_representer(Portable, _represent_portable)
