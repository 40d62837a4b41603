"""What all recorder callbacks share: faults stay inside, loggers get sinks, and an end always comes."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import Self, override

from lightning_recorder.callbacks.run import recorder_directory
from lightning_recorder.compiled import compiled_modules, flex_attention_users
from lightning_recorder.errors import ArgumentError, SelectionError, check_bool, describe_error, tell
from lightning_recorder.sinks import FilesSink, MultiSink, Sink, for_any_thread, sinks_for_loggers

__all__ = ["Compiled", "RecorderCallback", "guarded", "is_switched_off"]

Owner = TypeVar("Owner", bound="RecorderCallback")
Parameters = ParamSpec("Parameters")

Compiled = Literal["eager", "skip"]
"""What becomes of compiled modules on a recorded step."""

_LONGEST_NAME = 200  # bytes, of 255 that a file may have with the name of a checkpoint before it
_SWITCH = "LIGHTNING_RECORDER"


def is_switched_off() -> bool:
    """Whether ``LIGHTNING_RECORDER=off`` is in the environment; ``0``, ``false`` and ``no`` say the same."""
    return os.environ.get(_SWITCH, "").strip().lower() in ("off", "0", "false", "no")


def guarded(hook: Callable[Concatenate[Owner, Parameters], None]) -> Callable[Concatenate[Owner, Parameters], None]:
    """Turn what goes wrong in a hook of ours into one warning, after which the callback is off for the rest of the run.

    A wrong argument or selection is raised, since it shows before the first step; with ``strict`` everything is.
    """

    @functools.wraps(hook)
    def wrapper(self: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            hook(self, *args, **kwargs)
        except (ArgumentError, SelectionError):
            self.release(None)
            raise
        except Exception as error:
            is_news = self.give_up()
            if self.strict:
                raise
            if is_news:
                tell(f"{self} is off for the rest of the run, {hook.__name__} failed: {describe_error(error)}")

    return wrapper  # type: ignore[return-value]  # functools.wraps makes self a named argument


class RecorderCallback(Callback):
    """Base of the callbacks.

    A subclass puts on what it needs in :meth:`begin` and takes it off in :meth:`release`, which is called when the run
    ends, at teardown and on an exception, so more than once and in any state.

    Args:
        name: Tells this callback from others of its kind.
        compiled: What becomes of compiled modules: ``"eager"``, a recorded step runs without the compiled code;
            ``"skip"``, they are not recorded.
        sinks: Sinks beside those of the trainer's loggers, such as a :class:`~lightning_recorder.MemorySink`.
        strict: Raise errors of the recorder instead of warning of them.
    """

    def __init__(
        self, *, name: str = "", compiled: Compiled = "eager", sinks: Iterable[Sink] = (), strict: bool = False
    ) -> None:
        super().__init__()
        if isinstance(sinks, Sink):
            raise ArgumentError(
                f"sinks takes a list of sinks, got a single one: write sinks=[{type(sinks).__name__}(…)]"
            )
        if compiled not in ("eager", "skip"):
            raise ArgumentError(f"compiled must be 'eager' or 'skip', got {compiled!r}")
        if not isinstance(name, str):
            raise ArgumentError(f"name must be a string, got {name!r}")
        if name and (Path(name).name != name or "\\" in name):
            raise ArgumentError(f"name must be that of a file, without a folder, got {name!r}")
        if "\0" in name or "\ufffd" in (text := name.encode("utf-8", "surrogatepass").decode("utf-8", "replace")):
            raise ArgumentError(f"name must be that of a file, without such characters, got {name!r}")
        if len(text.encode()) > _LONGEST_NAME:
            raise ArgumentError(f"name must be that of a file, of at most {_LONGEST_NAME} bytes, got {name!r:.80}")
        self.name = name
        self.compiled = compiled
        self.strict = strict
        check_bool("strict", strict)
        if not isinstance(sinks, Iterable):
            raise ArgumentError(f"sinks takes a list of sinks, got {sinks!r}")
        given: list[object] = list(sinks)
        for sink in given:
            if not isinstance(sink, Sink):
                called = f"the class {sink.__name__}: write {sink.__name__}()" if isinstance(sink, type) else repr(sink)
                raise ArgumentError(f"sinks takes Sink instances, got {called}")
        self._own_sinks = [sink for sink in given if isinstance(sink, Sink)]
        self._sink: MultiSink | None = None
        self._keepers: MultiSink | None = None  # the same without what stands in for the loggers
        self._enabled = True

    def __str__(self) -> str:
        return type(self).__name__ + (f" {self.name!r}" if self.name else "")

    @abstractmethod
    def begin(self, trainer: Trainer, pl_module: LightningModule, directory: Path | None) -> None:
        """Make ready for a run; the model is on its device and complete.

        Args:
            trainer: The trainer.
            pl_module: The model.
            directory: The folder of the run's recordings, if it has one.
        """

    @abstractmethod
    def release(self, trainer: Trainer | None) -> None:
        """Take everything off the model and the trainer; must bear to be called again.

        After a fault of ours there is no trainer.
        """

    def give_up(self) -> bool:
        """Record nothing more, since something went wrong; answers whether that was not so before."""
        self.release(None)
        return True

    def begins_with(self, function: str) -> bool:
        """Whether something is recorded of ``trainer.fit``, ``validate``, ``test`` or ``predict``."""
        return function == "fit"

    def stay_away(self, trainer: Trainer) -> None:
        """Say to the other processes of a run that this one, in which recording is switched off, takes no part."""

    @property
    def enabled(self) -> bool:
        """Whether what is due is recorded."""
        return self._enabled

    def disable(self) -> None:
        """Record nothing from the next batch on."""
        self._enabled = False

    def enable(self) -> None:
        """Record again, from the next batch on."""
        self._enabled = True

    def alike(self, trainer: Trainer) -> list[Self]:
        """The trainer's callbacks of this kind and name, this one included."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        return [each for each in callbacks if type(each) is type(self) and each.name == self.name]

    def label(self, trainer: Trainer, group: str) -> str:
        """What files call this callback: the group, its name, and its place among those that are called the same."""
        place = next((index for index, each in enumerate(self.alike(trainer)) if each is self), 0)
        return "-".join([group, *filter(None, [self.name]), *([str(place + 1)] if place else [])])

    def open_sinks(self, trainer: Trainer, directory: Path | None = None) -> None:
        """Open the sinks on rank zero.

        Args:
            trainer: Whose loggers are served.
            directory: A folder for what none of the loggers can show; nothing is lost because a logger has no
                histograms, or because there is none.
        """
        if trainer.is_global_zero:
            loggers = MultiSink(map(for_any_thread, sinks_for_loggers(trainer.loggers)), strict=self.strict)
            own = [for_any_thread(sink) for sink in self._own_sinks]
            files = None if directory is None else FilesSink(directory)
            all_shown = MultiSink([loggers], fallback=files, strict=self.strict)
            self._sink = MultiSink([all_shown, *own], strict=self.strict)
            self._keepers = MultiSink([loggers, *own], strict=self.strict)

    def warn_of_eager_memory(self, pl_module: LightningModule) -> None:
        """Say so if running compiled modules eagerly takes much more memory."""
        if self.compiled == "eager" and compiled_modules(pl_module):
            names = flex_attention_users(pl_module)
            if names:
                tell(
                    f"{self} runs recorded steps without compiled code, in which flex_attention of {names[0]!r} takes "
                    "the memory of all scores: compiled='skip' leaves compiled modules out"
                )

    @guarded
    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "fit")

    @guarded
    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "validate")
        self.before_evaluation(trainer)

    @guarded
    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "test")
        self.before_evaluation(trainer)

    @guarded
    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_run(trainer, pl_module, "predict")

    def before_evaluation(self, trainer: Trainer) -> None:
        """Take off what is for training batches alone."""

    def _start_run(self, trainer: Trainer, pl_module: LightningModule, function: str) -> None:
        """Begin with a run; a validation that is a part of a fit is none."""
        if str(getattr(trainer.state.fn, "value", "")) != function or not self.begins_with(function):
            return
        self.release(trainer)
        directory = recorder_directory(trainer) if trainer.world_size > 1 or not is_switched_off() else None
        if is_switched_off():
            self.stay_away(trainer)
        else:
            self.begin(trainer, pl_module, directory)

    @guarded
    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @guarded
    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._end(trainer)
        except Exception as error:  # noqa: BLE001 - also with strict: it must not take the place of the exception
            self.release(None)
            tell(f"{self} could not write all that it had recorded: {describe_error(error)}")

    @guarded
    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        try:
            self.release(trainer)
        finally:
            # Lightning hangs two methods of the model on a callback, and with them all that the model holds.
            self.__dict__.pop("log", None)
            self.__dict__.pop("log_dict", None)
            sink, self._sink, self._keepers = self._sink, None, None
        if sink is not None:
            sink.flush()
            sink.replay()

    def __getstate__(self) -> dict[str, Any]:
        # A sink holds open files and the trainer's loggers; whoever copies or sends the callback gets one that has not
        # begun.
        # Lightning hangs two methods of the model on it, and with them the model.
        own = {key: value for key, value in self.__dict__.items() if key not in ("log", "log_dict")}
        return {**own, "_sink": None, "_keepers": None}
