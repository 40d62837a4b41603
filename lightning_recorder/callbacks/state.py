"""What a recorder keeps from one fit to the next, in checkpoints and between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_recorder.errors import describe_error
from lightning_recorder.recorders import Report, RunRecorder
from lightning_recorder.taps import Site

__all__ = ["KeptState"]

_VERSION = 1


class KeptState:
    """What was not in any record yet when a fit ended or was saved, until the next one goes on from it.

    That is at the first batch: only then the trainer knows its step, and all ranks have agreed.

    Args:
        settings: What a saved state has to agree with.
    """

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._state: dict[str, Any] | None = None
        self._global_step: int | None = None  # at which it was kept; a checkpoint's has none, since it brings its own

    @property
    def waits(self) -> bool:
        """Whether there is a state that no run has taken."""
        return self._state is not None

    def packed(self, run: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """What goes into a checkpoint: what waits still, else the state of the run.

        Args:
            run: That state, empty without a run.
            report: Knows which sites have had NaN or infinities.
        """
        if self._state is not None and self._global_step is None:
            return self._state
        return {
            "version": _VERSION,
            "settings": self._settings,
            "nonfinite": [list(site) for site in sorted(report.nonfinite)],
            **(run if self._state is None else self._state),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`packed` gave to a checkpoint."""
        self._state, self._global_step = dict(state), None

    def keep(self, run: Mapping[str, Any], global_step: int) -> None:
        """Take the state of a run that ended at this step, for a fit of the same trainer that goes on there."""
        self._state, self._global_step = dict(run), global_step

    def forget(self) -> None:
        """Let nothing wait."""
        self._state = self._global_step = None

    def hand_over(self, run: RunRecorder, report: Report, *, global_step: int, step: int, epoch: int) -> str:
        """Let a run go on from it; the answer is why it cannot, empty if it does.

        Args:
            run: The run, on each rank.
            report: Learns which sites have had NaN or infinities.
            global_step: Where the trainer stands; a state that was kept at another step is none of this run.
            step: The step that the run goes on with, as ``self.log`` counts.
            epoch: Its epoch.
        """
        state, kept_at = self._state, self._global_step
        self.forget()
        if state is None or kept_at not in (None, global_step):
            return ""
        try:
            if kept_at is None:
                if (state["version"], state["settings"]) != (_VERSION, self._settings):
                    return "its state in the checkpoint is that of other settings or another version"
                report.nonfinite |= {Site(*site) for site in state["nonfinite"]}
                if not state.keys() - {"version", "settings", "nonfinite"}:
                    return ""
            run.load_state_dict(state, step, epoch)
        except (KeyError, TypeError, ValueError) as error:
            return f"its state in the checkpoint cannot be read: {describe_error(error)}"
        return ""
