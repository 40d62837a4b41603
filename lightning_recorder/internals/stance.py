"""Eager execution of compiled code while at least one recorder needs module hooks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from lightning_recorder.internals.compiled import describe_compiled, observe_compiled_calls, stop_observing

__all__ = ["EagerStance"]


class _Shared:
    """The single stance of the process and the number of its holders."""

    # Reentrant, since the garbage collector may release an abandoned hold while this thread acquires or releases
    # another.
    lock = threading.RLock()
    holders = 0
    stance: AbstractContextManager[object] | None = None
    calls = 0
    """The number of calls of compiled code that have run eagerly so far."""
    ran: dict[str, int]
    """The number of the latest call of each of these functions, by name."""


_Shared.ran = {}


def _note(function: Callable[..., object], /) -> None:
    with _Shared.lock:
        _Shared.calls += 1
        _Shared.ran[describe_compiled(function)] = _Shared.calls


class EagerStance:
    """A hold on ``torch.compiler.set_stance("force_eager")``.

    The first hold sets the stance; releasing the last one restores the previous stance.

    Hooks that are registered on a compiled module after its first call silently never fire. Under the stance they do,
    and the compiled code is reused afterwards without recompilation. Several recorders may hold the stance over the
    same step and release it in the order in which they acquired it. Nested context managers would then stay in eager
    mode, hence the counter.

    Note:
        The stance is global to the process. If ``torch._dynamo`` was never imported, nothing can be compiled and
        holding the stance is a no-op.
    """

    def __init__(self) -> None:
        self._held = False
        self._since = 0
        self._ran: dict[str, None] = {}

    @property
    def ran(self) -> tuple[str, ...]:
        """Names of compiled code that ran eagerly during all holds of this object, in any thread of the process.

        Empty if the user's own stance runs everything eagerly.
        """
        self._collect()
        return tuple(self._ran)

    def _collect(self) -> None:
        if self._held and _Shared.calls > self._since:
            with _Shared.lock:
                since, self._since = self._since, _Shared.calls
                self._ran.update(dict.fromkeys(name for name, call in _Shared.ran.items() if call > since))

    def __reduce__(self) -> tuple[type[EagerStance], tuple[()]]:
        return EagerStance, ()  # a copy has no hold

    def __del__(self) -> None:
        # During interpreter shutdown torch is unusable and nothing will be compiled.
        if not sys.is_finalizing():
            self.release()

    def hold(self) -> None:
        """Run compiled code eagerly until :meth:`release`. Idempotent."""
        if self._held or "torch._dynamo" not in sys.modules:
            return
        with _Shared.lock:
            if _Shared.holders == 0:
                stance = _Shared.stance = torch.compiler.set_stance("force_eager")
                # If the user's own stance is the same, this one changes nothing.
                if getattr(getattr(stance, "prev", None), "stance", "") != "force_eager":
                    observe_compiled_calls(_note)
            _Shared.holders += 1
            self._since = _Shared.calls
            self._held = True

    def release(self) -> None:
        """Release the stance; a no-op without a hold."""
        if not self._held:
            return
        with _Shared.lock:
            self._collect()
            self._held = False
            _Shared.holders -= 1
            if _Shared.holders == 0 and _Shared.stance is not None:
                stop_observing(_note)
                _Shared.ran.clear()
                stance, _Shared.stance = _Shared.stance, None
                stance.__exit__(None, None, None)
