"""The states of the global random number generators, cheap enough to keep at every step."""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RandomStates", "foreign_code", "unchanged_random_numbers"]

_MT19937_BYTES = 624 * 4 + 4  # the 624 words of the generator, and the position in the words
# Each number moves the position, and every 624 numbers replace all words. So it suffices to compare a few words.
_COMPARED_BYTES = 64


class RandomStates:
    """The states of the generators of torch, Python and NumPy, on the CPU and optionally on other devices.

    Note:
        Does not wait for a device, because the state of a CUDA generator is a seed and an offset on the host. Reading
        the state takes 50 µs for NumPy and 15 µs for Python. Each state is therefore read again only if the memory of
        its generator has changed. Only the position and 15 words of the memory are compared.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.torch = torch.get_rng_state()
        # This runs in every step, so avoid calls in the usual case that no number was drawn.
        python: Any = getattr(random.getstate, "__self__", None)  # a program may have replaced the function
        numpy = _BIT_GENERATOR()
        if python is not _Python.generator or _Python.seen != (_Python.memory[:_COMPARED_BYTES], python.gauss_next):
            _read_python(python)
        if numpy is not _Numpy.generator or _Numpy.seen != _Numpy.memory[_COMPARED_OF_NUMPY]:
            _read_numpy(numpy)
        self.python, self.numpy = _Python.state, _Numpy.state
        self.devices: dict[torch.device, Tensor] = {}
        for device in devices:
            if device.type not in ("cpu", "meta"):
                self.devices[device] = torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - nets draw from the global generator
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)

    def equal(self, other: RandomStates) -> bool:
        """Return True if both states are equal, which means that no number was drawn in between."""
        # Unchanged states of Python and NumPy are usually the same object, because they are not read again.
        are_same = self.python is other.python or self.python == other.python
        are_same &= self.numpy is other.numpy or repr(self.numpy) == repr(other.numpy)
        ours, theirs = self.tensors(), other.tensors()
        return are_same and all(torch.equal(ours[name], theirs[name]) for name in ours)

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of torch's generators, by name."""
        return {"random.torch": self.torch, **{f"random.{device}": state for device, state in self.devices.items()}}

    def numbers(self) -> dict[str, Any]:
        """Return the states of the generators of Python and NumPy as JSON values."""
        words = self.numpy["state"] if self.numpy["bit_generator"] == "MT19937" else None
        legacy = {name: value for name, value in self.numpy.items() if name != "state"}
        plain = None if words is None else {**legacy, "key": words["key"].tolist(), "pos": int(words["pos"])}
        return {"python": self.python, "numpy": plain}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> RandomStates:
        """Create the states from the results of :meth:`tensors` and :meth:`numbers`.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError: If a generator of the host does not accept its state.
        """
        found = cls()
        found.torch = tensors["random.torch"]
        names = [name for name in tensors if name.startswith("random.") and name != "random.torch"]
        found.devices = {torch.device(name.removeprefix("random.")): tensors[name] for name in names}
        version, words, gauss = numbers["python"]
        found.python = (version, tuple(words), gauss)
        if numbers["numpy"] is not None:
            known = dict(numbers["numpy"])
            key = np.array(known.pop("key"), dtype=np.uint32)
            found.numpy = {**known, "state": {"key": key, "pos": known.pop("pos")}}
        random.Random().setstate(found.python)
        torch.Generator().set_state(found.torch)
        np.random.RandomState().set_state(found.numpy)
        return found


@contextmanager
def unchanged_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the generators of the CPU and of a device on exit, if their states have changed."""
    # The generators of other devices need other functions, and are not restored.
    devices = [device] if device.type in ("cuda", "xpu") else []
    before = RandomStates(devices)
    try:
        yield
    finally:
        if not RandomStates(devices).equal(before):
            before.restore()


def foreign_code() -> AbstractContextManager[None]:
    """Return a context for user code that runs only because of the recorder. It restores random number generators."""
    is_cuda = torch.cuda.is_initialized()
    return unchanged_random_numbers(
        torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    )


class _Python:
    generator: Any = ...  # the generator whose memory is known
    memory: Any = None
    seen: Any = None
    state: Any = None


def _read_python(generator: Any) -> None:
    _Python.state = random.getstate()
    if not _CAN_READ_PYTHON or not isinstance(generator, random.Random):
        _Python.generator = ...
        return
    if generator is not _Python.generator:
        _Python.generator, _Python.memory = generator, _python_memory(generator)
    # The normal number that the generator keeps for the next call is not part of this memory.
    _Python.seen = _Python.memory[:_COMPARED_BYTES], generator.gauss_next


def _python_memory(generator: random.Random) -> Any:
    """Return the memory of a Python generator as an array of bytes, valid as long as the generator exists."""
    header = object.__basicsize__
    return (ctypes.c_char * (_random.Random.__basicsize__ - header)).from_address(id(generator) + header)


def _can_read_python() -> bool:
    """Return True if the memory of a Python generator begins with its state: the position and the words."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(0)
    for _ in range(3):
        *words, position = generator.getstate()[1]
        state = np.array([position, *words], dtype=np.uint32).tobytes()
        if not _python_memory(generator).raw.startswith(state):
            return False
        generator.random()
    return True


class _Numpy:
    generator: object = ...  # the generator whose memory is known
    memory: Any = None
    seen: Any = None
    state: Any = None


_BIT_GENERATOR: Any = getattr(np.random, "get_bit_generator", lambda: None)
_COMPARED_OF_NUMPY = slice(_MT19937_BYTES - _COMPARED_BYTES, None)  # the position follows the words


def _read_numpy(generator: Any) -> None:
    _Numpy.state = np.random.get_state(legacy=False)  # noqa: NPY002 - the global generator
    if not isinstance(generator, np.random.MT19937):
        _Numpy.generator = ...
        return
    if generator is not _Numpy.generator:
        memory = (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)
        _Numpy.generator, _Numpy.memory = generator, memory
    _Numpy.seen = _Numpy.memory[_COMPARED_OF_NUMPY]


_CAN_READ_PYTHON = _can_read_python()
