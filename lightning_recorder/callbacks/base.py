"""What all recorder callbacks share: faults stay inside, loggers get sinks, and an end always comes."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, SelectionError, describe_error, tell
from lightning_recorder.sinks import FilesSink, MultiSink, Sink, sinks_for_loggers

__all__ = ["RecorderCallback", "guarded"]

Self = TypeVar("Self", bound="RecorderCallback")
Parameters = ParamSpec("Parameters")


def guarded(hook: Callable[Concatenate[Self, Parameters], None]) -> Callable[Concatenate[Self, Parameters], None]:
    """Turn what goes wrong in a hook of ours into one warning, after which the callback is off for the rest of the run.

    A wrong argument or selection is raised, since it shows before the first step; with ``strict`` everything is.
    """

    @functools.wraps(hook)
    def wrapper(self: Self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            hook(self, *args, **kwargs)
        except (ArgumentError, SelectionError):
            self.release(None)
            raise
        except Exception as error:
            self.release(None)
            if self.strict:
                raise
            name, kind = type(self).__name__, type(error).__name__
            tell(f"{name} is off for the rest of the run, {hook.__name__} failed: {kind}: {error}")

    return wrapper  # type: ignore[return-value]  # functools.wraps makes self a named argument


class RecorderCallback(Callback):
    """Base of the callbacks.

    A subclass puts on what it needs in :meth:`begin` and takes it off in :meth:`release`, which is called when the fit
    ends, at teardown and on an exception, so more than once and in any state.

    Args:
        sinks: Sinks beside those of the trainer's loggers, such as a :class:`~lightning_recorder.MemorySink`.
        strict: Raise errors of the recorder instead of warning of them.
    """

    def __init__(self, *, sinks: Iterable[Sink] = (), strict: bool = False) -> None:
        super().__init__()
        if isinstance(sinks, Sink):
            raise ArgumentError(
                f"sinks takes a list of sinks, got a single one: write sinks=[{type(sinks).__name__}(…)]"
            )
        self.strict = strict
        given: list[object] = list(sinks)
        for sink in given:
            if not isinstance(sink, Sink):
                called = f"the class {sink.__name__}: write {sink.__name__}()" if isinstance(sink, type) else repr(sink)
                raise ArgumentError(f"sinks takes Sink instances, got {called}")
        self._own_sinks = [sink for sink in given if isinstance(sink, Sink)]
        self._sink: MultiSink | None = None

    @abstractmethod
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make ready for a fit; the model is on its device and complete."""

    @abstractmethod
    def release(self, trainer: Trainer | None) -> None:
        """Take everything off the model and the trainer; must bear to be called again.

        After a fault of ours there is no trainer.
        """

    def open_sinks(self, trainer: Trainer, directory: Path | None = None) -> None:
        """Open the sinks on rank zero.

        Args:
            trainer: Whose loggers are served.
            directory: A folder for what none of the loggers can show; nothing is lost because a logger has no
                histograms, or because there is none.
        """
        if trainer.is_global_zero:
            files = None if directory is None else FilesSink(directory)
            loggers = MultiSink(sinks_for_loggers(trainer.loggers), fallback=files, strict=self.strict)
            self._sink = MultiSink([loggers, *self._own_sinks], strict=self.strict)

    @guarded
    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.release(trainer)
        self.begin(trainer, pl_module)

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
            tell(f"{type(self).__name__} could not write all that it had recorded: {describe_error(error)}")

    @guarded
    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        self.release(trainer)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.flush()

    def __getstate__(self) -> dict[str, Any]:
        # A sink holds open files and the trainer's loggers; whoever copies or sends the callback gets one that has not
        # begun.
        # Lightning hangs two methods of the model on it, and with them the model.
        own = {key: value for key, value in self.__dict__.items() if key not in ("log", "log_dict")}
        return {**own, "_sink": None}
