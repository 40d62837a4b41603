"""Guards for the hooks of callbacks: against errors, and against runs nested in the recorded run."""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_recorder.callbacks.lightning import Callback, Trainer
from lightning_recorder.callbacks.trainer import running_function
from lightning_recorder.disk import raise_errors
from lightning_recorder.errors import ArgumentError, SelectionError, describe_error, warn

__all__ = ["BATCH_HOOKS", "SET_BY_LIGHTNING", "GuardedCallback", "guarded"]

Owner = TypeVar("Owner", bound="GuardedCallback")
Parameters = ParamSpec("Parameters")

SET_BY_LIGHTNING = ("log", "log_dict")
"""The methods of the model that Lightning sets on a callback. They keep a reference to the whole model."""

BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
)
"""The hooks that Lightning calls for each batch of a fit: first those of training, then those of validation."""

_OURS = __name__.partition(".")[0]


def guarded(hook: Callable[Concatenate[Owner, Parameters], None]) -> Callable[Concatenate[Owner, Parameters], None]:
    """Decorate a hook so that an error in it disables the callback for the rest of the run and gives one warning.

    ``ArgumentError`` and ``SelectionError`` are raised, since they occur before the first step, unless the callback was
    added by ``LIGHTNING_RECORDER``. With ``strict``, all errors are raised. Hooks are ignored if they come from a
    trainer that runs inside the recorded run of another trainer.
    """

    @functools.wraps(hook)
    def wrapper(self: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        # This runs several times per step, so the common case makes no further calls.
        owner: object = self
        if not isinstance(owner, GuardedCallback):
            _refuse_class(self, hook.__name__)
            return
        trainer = args[0] if args else kwargs.get("trainer")
        outer = self._trainer
        if outer is not None and outer() is not trainer and self._is_nested(trainer, hook.__name__):
            return
        try:
            if self.strict:
                with raise_errors(True):
                    hook(self, *args, **kwargs)
            else:
                hook(self, *args, **kwargs)
        except (ArgumentError, SelectionError) as error:
            self._release(None)
            if not str(error).startswith(str(self)):
                error.args = (f"{self}: {error}",)
            if self.strict or not self._is_from_environment:
                raise
            warn(str(error))
        except Exception as error:
            is_news = True
            with suppress(Exception):  # the failed object may raise again during its release
                is_news = self._give_up()
            if self.strict:
                raise
            if is_news:
                warn(f"{self} is off for the rest of the run, {hook.__name__} failed: {describe_error(error)}")

    # Without a docstring, help() would show the docstring of Lightning's hook, which does not describe this one.
    wrapper.__doc__ = hook.__doc__ or "Called by Lightning."
    return wrapper  # type: ignore[return-value]  # functools.wraps makes self a named argument


def _refuse_class(trainer: Any, hook: str) -> None:
    """Raise an error if ``callbacks`` contains a class. Lightning would call its hooks with the trainer as ``self``.

    Lightning calls ``on_exception`` after this error. That hook must not raise a second error, which would replace the
    first one.
    """
    listed = getattr(trainer, "callbacks", [])
    classes = [each for each in listed if isinstance(each, type) and issubclass(each, GuardedCallback)]
    for each in classes:
        for name in SET_BY_LIGHTNING:
            if name in vars(each):  # Lightning set it on the class
                delattr(each, name)
    if hook != "on_exception":
        name = classes[0].__name__ if classes else "a recorder"
        raise ArgumentError(f"callbacks contains the class {name} instead of an instance: write {name}()")


class GuardedCallback(Callback):
    """Base class of callbacks whose hooks are :func:`guarded`."""

    strict: bool
    """Raise errors of the recorder instead of warning about them."""
    _is_from_environment: bool = False
    """True if ``LIGHTNING_RECORDER`` added the callback. Then even wrong arguments do not end a run."""
    _trainer: weakref.ref[Trainer] | None
    _has_warned_of_nested_run: bool

    @abstractmethod
    def _release(self, trainer: Trainer | None) -> None:
        """Remove all hooks and wrappers. Must be idempotent. ``trainer`` is None after an internal error."""

    def _hide_hooks(self, trainer: Trainer, *hooks: str) -> None:
        """Let Lightning skip some of :data:`BATCH_HOOKS` until they are shown again.

        A hook that is ``None`` costs a tenth of a hook that does nothing, since Lightning skips it before it enters its
        profiler. A hook that the user has overridden or replaced is not hidden. No hook is hidden if another callback
        calls the hooks instead of the trainer, because that callback would fail on ``None``.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        if any(each is self for each in callbacks):
            table = vars(self)
            for name in hooks:
                owner = next(each for each in type(self).__mro__ if name in vars(each))
                if name not in table and (owner is Callback or owner.__module__.partition(".")[0] == _OURS):
                    table[name] = None

    def _show_hooks(self) -> None:
        """Let Lightning call all hooks."""
        table = vars(self)
        for name in BATCH_HOOKS:
            if table.get(name, self) is None:
                del table[name]

    def _give_up(self) -> bool:
        """Stop recording after an error; return True if this is the first error."""
        self._release(None)
        return True

    def _begins_with(self, function: str) -> bool:
        """Return True if this callback records the function: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
        return function == "fit"

    def _is_nested(self, trainer: object, hook: str) -> bool:
        """Return True if a hook of another trainer comes from a run inside the recorded run, and warn once about it."""
        outer = None if self._trainer is None else self._trainer()
        if outer is None or outer.state.status != "running":
            return False
        function = running_function(trainer)
        if hook.endswith("_start") and not self._has_warned_of_nested_run and self._begins_with(function):
            self._has_warned_of_nested_run = True
            warn(
                f"{self} does not record the {function} of another Trainer inside the run that it records: give the "
                f"inner Trainer its own {type(self).__name__}"
            )
        return True
