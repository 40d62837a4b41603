"""The functions that add recorders to programs that do not mention this package.

Lightning calls :func:`callbacks_from_environment` in every program of the environment. Unless the variable
``LIGHTNING_RECORDER`` asks for recorders, only the standard library is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from lightning_recorder.switch import CHECK_ONLY, VARIABLE, is_check, is_switched_off, setting

__all__ = ["callbacks_from_environment", "see_other_trainers"]

_HANDLER = "transformers.trainer_callback"
"""The module with the callback list of the transformers Trainer, which has no entry points."""

_OPTIMIZERS = "torch.optim.optimizer"
"""The module with the global optimizer hooks, which detect a loop without a Trainer."""

_FUNCTION = """\
nothing is checked, since no Trainer of Lightning or transformers was made. In a loop, give the step as a function:
  from lightning_recorder import Monitor
  with Monitor(model, optimizer, step_function=compute_loss) as monitor:  # around the loop
      with monitor.step(batch):  # around the code of a step; compute_loss(batch) returns its loss"""

_FIVE_LINES = """\
nothing is recorded, since no Trainer of Lightning or transformers was made. Five lines record a loop:
  from lightning_recorder import Monitor
  with Monitor(model, optimizer, log_dir="runs/1") as monitor:  # around the loop
      with monitor.step(batch):  # around the code of a step
          monitor.log(loss=loss)  # in the step
  lightning-recorder doctor runs/1  # in a terminal"""

_seen: set[str] = set()  # the kinds of trainers created so far
_looking: list[bool] = []  # not empty after see_other_trainers() was called


def callbacks_from_environment() -> list[Any]:
    """Return the callback that adds recorders to a trainer; an empty list unless ``LIGHTNING_RECORDER`` asks for them.

    Never raises. An error causes one warning, and the program continues without recorders.
    """
    _seen.add("lightning")
    if not setting() or is_switched_off():
        return []
    try:
        from lightning_recorder.callbacks.attach import AttachRecorders

        return [AttachRecorders()]
    except Exception as error:  # noqa: BLE001 - the program must not end because of a recorder
        _warn(error)
        return []


def see_other_trainers() -> None:
    """Add a callback to each transformers Trainer, and explain how a plain loop is recorded or checked.

    transformers has no entry point for callbacks, so this function is called when Python starts. Two files in ``site/``
    call it: the ``.pth`` file that the installation puts next to the package, and ``sitecustomize.py`` for
    ``lightning-recorder run``, which also works if the package is in a folder of ``PYTHONPATH``. This function never
    raises.
    """
    if _looking or not setting() or is_switched_off():
        return
    _looking.append(True)
    with contextlib.suppress(Exception):
        _after_import(_HANDLER, _extend)
        atexit.register(_explain)
        if setting().lower() == CHECK_ONLY:
            _after_import(_OPTIMIZERS, lambda module: module.register_optimizer_step_pre_hook(_end_loop))


def _after_import(name: str, change: Callable[[Any], object]) -> None:
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder:
    """An import finder that changes one module after its import."""

    def __init__(self, name: str, change: Callable[[Any], object]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of this module, and ``None`` for any other module."""
        if name != self._name:
            return None
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self]
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with contextlib.suppress(Exception):
                    self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


def _extend(module: Any) -> None:
    """Append a recording callback to each new callback list."""
    handler = module.CallbackHandler
    make = handler.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _seen.add("transformers")
        try:
            from lightning_recorder.huggingface import CallbackFromEnvironment

            self.callbacks.append(CallbackFromEnvironment())
        except Exception as error:  # noqa: BLE001 - the program must not end because of a recorder
            _warn(error)

    handler.__init__ = init


def _end_loop(*_: object) -> None:
    """End a program under ``check`` with status 2 at the first step of a plain loop, which cannot be checked."""
    if not _seen and "lightning_recorder.loops.monitor" not in sys.modules:
        _seen.add("loop")
        sys.stderr.write(f"lightning-recorder check: {_FUNCTION}\n")
        raise SystemExit(2)


def _explain() -> None:
    """Explain how a plain loop is recorded or checked, if an optimizer was created but no trainer was detected."""
    is_first = os.environ.get("RANK", "0") == "0" and os.environ.get("LOCAL_RANK", "0") == "0"
    if _seen or not is_first or "lightning_recorder.loops.monitor" in sys.modules:
        return
    with contextlib.suppress(Exception):
        if any(getattr(each.step, "hooked", False) for each in _subclasses(sys.modules["torch"].optim.Optimizer)):
            sys.stderr.write(f"{VARIABLE}={setting()}: {_FUNCTION if is_check() else _FIVE_LINES}\n")


def _subclasses(base: Any) -> Iterator[Any]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _warn(error: Exception) -> None:
    with contextlib.suppress(Exception):  # python -W error turns the warning into an exception
        warnings.warn(f"{VARIABLE}={setting()}: nothing is recorded, {error!r}", stacklevel=3)
