"""The part of a recorder that belongs to one module: its tap, and what that has brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.recorders.stores import Store
from lightning_recorder.taps import Receiver, Site, Tap

__all__ = ["SubRecorder"]


class SubRecorder:
    """The part of a recorder that belongs to one module.

    Args:
        name: The module's name, unique in the recorder.
        module: The module.
        make_tap: Makes the tap of the module.
        make_store: Makes the store of a tensor that is seen for the first time.
        make_nothing: Gives the data of a module that has shown no tensor.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        make_tap: Callable[[Mapping[str, nn.Module], Receiver], Tap],
        make_store: Callable[[], Store],
        make_nothing: Callable[[], Any],
    ) -> None:
        self.name = name
        self.module = module
        self.tap = make_tap({name: module}, self._receive)
        self._make_store = make_store
        self._make_nothing = make_nothing
        self._sites: dict[str, _Recorded] = {}

    @property
    def paths(self) -> dict[str, Any]:
        """What was recorded, by the path of the tensor at the module; see :class:`~lightning_recorder.Site`."""
        return {path: site.store.value for path, site in self._sites.items()}

    @property
    def data(self) -> Any:
        """What was recorded: the value of the one path, or all of them by path if the module showed several tensors."""
        values = self.paths
        if not values:
            return self._make_nothing()
        return values if len(values) > 1 else next(iter(values.values()))

    @property
    def samples(self) -> int:
        """How many samples were recorded, the rows of the tensor that was seen first; one without dimensions is one."""
        return next(iter(self._sites.values())).samples if self._sites else 0

    @property
    def calls(self) -> int:
        """How many calls were recorded, of a gradient how many gradients."""
        return max((site.calls for site in self._sites.values()), default=0)

    def apply(self, function: Callable[[Any, int], Any]) -> None:
        """Put what the function makes of the data of each path, and of its samples, in its place."""
        for site in self._sites.values():
            site.store.replace(function(site.store.value, site.samples))

    def reset(self) -> None:
        """Forget what was recorded, and that it failed; the hooks stay."""
        self.tap.revive()
        for site in self._sites.values():
            site.store.release()
        self._sites.clear()

    def state_dict(self) -> dict[str, Any]:
        """What was recorded as plain containers and tensors."""
        return {
            path: {"samples": site.samples, "calls": site.calls, "state": site.store.state_dict()}
            for path, site in self._sites.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.reset()
        for path, saved in state.items():
            site = _Recorded(self._make_store(), int(saved["samples"]), int(saved["calls"]))
            site.store.load_state_dict(saved["state"])
            self._sites[path] = site

    # Validation may run in inference mode; what is made in it could not be updated outside.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _receive(self, site: Site, tensor: Tensor) -> None:
        recorded = self._sites.get(site.path) or _Recorded(self._make_store())
        with _precise(tensor.device):
            taken = recorded.store.update(tensor)
        if taken:
            recorded.calls += 1
            recorded.samples += tensor.size(0) if tensor.dim() else 1
            self._sites[site.path] = recorded


def _precise(device: torch.device) -> AbstractContextManager[object]:
    """Without the autocast of the model, which would round what a reduction multiplies."""
    is_on = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


@dataclass
class _Recorded:
    """What there is of one tensor of a module."""

    store: Store
    samples: int = 0
    calls: int = 0
