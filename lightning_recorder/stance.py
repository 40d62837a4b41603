"""Eager execution of compiled modules while at least one recorder needs their hooks."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager

import torch

__all__ = ["EagerStance"]


class _Shared:
    """The one stance of the process and how many hold it."""

    # Reentrant, since the garbage collector may release a forgotten hold while this thread takes or releases another.
    lock = threading.RLock()
    holders = 0
    stance: AbstractContextManager[object] | None = None


class EagerStance:
    """A hold on ``torch.compiler.set_stance("force_eager")``.

    The first hold sets the stance, the last to go restores what was there.

    Hooks that are put on a compiled module after its first call never fire, and say nothing; under the stance they do,
    and the compiled code is used again afterwards without being compiled again. Several recorders hold the stance over
    the same step and let go in the order in which they came, which would leave a plain nesting of the context managers
    stuck in eager mode: therefore the count.

    Note:
        The stance is global to the process. Where nothing has imported ``torch._dynamo`` nothing can be compiled, and
        nothing is done.
    """

    def __init__(self) -> None:
        self._held = False

    def __reduce__(self) -> tuple[type[EagerStance], tuple[()]]:
        return EagerStance, ()  # a copy holds nothing

    def __del__(self) -> None:
        # While the interpreter ends torch can be asked for nothing, and nothing is left to be compiled.
        if not sys.is_finalizing():
            self.release()

    def hold(self) -> None:
        """Run compiled modules eagerly until :meth:`release`; holding twice is holding once."""
        if self._held or "torch._dynamo" not in sys.modules:
            return
        with _Shared.lock:
            if _Shared.holders == 0:
                _Shared.stance = torch.compiler.set_stance("force_eager")
            _Shared.holders += 1
            self._held = True

    def release(self) -> None:
        """Let go of the stance; without a hold, nothing."""
        if not self._held:
            return
        with _Shared.lock:
            self._held = False
            _Shared.holders -= 1
            if _Shared.holders == 0 and _Shared.stance is not None:
                stance, _Shared.stance = _Shared.stance, None
                stance.__exit__(None, None, None)
