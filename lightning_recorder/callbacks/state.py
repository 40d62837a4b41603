"""The state that a recorder carries from one fit to the next, in memory or in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_recorder.errors import describe_error
from lightning_recorder.outputs import SinkFormatter
from lightning_recorder.statistics import RunRecorder
from lightning_recorder.taps import Site

__all__ = ["ResumeState"]

_VERSION = 1


class ResumeState:
    """Holds statistics that were not yet written to a record when a fit ended or was saved, until the next fit resumes.

    They are restored at the first batch. Before it, the trainer does not know its step and the ranks have not agreed.

    Args:
        settings: A description of the settings, which must equal that of a saved state.
    """

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._state: dict[str, Any] | None = None
        self.waits = False
        """True while there is a state that no run has restored."""
        self._global_step: int | None = None  # the step at which the state was kept; None for a state from a checkpoint

    def packed(self, run: Mapping[str, Any], report: SinkFormatter) -> dict[str, Any]:
        """Return the state for a checkpoint: the pending state if there is one, otherwise the state of the run.

        Args:
            run: The state of the run; empty without a run.
            report: The report, which tracks the shown tags and the sites that had NaN or infinities.
        """
        if self._state is not None and self._global_step is None:
            return self._state
        return {
            "version": _VERSION,
            "settings": self._settings,
            "nonfinite": [list(site) for site in sorted(report.nonfinite)],
            "tags": report.state_dict(),
            **(run if self._state is None else self._state),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state from a checkpoint, as returned by :meth:`packed`."""
        self._state, self._global_step, self.waits = dict(state), None, True

    def keep(self, run: Mapping[str, Any], global_step: int) -> None:
        """Keep the state of a run that ended at this step, for the next fit of the same trainer."""
        self._state, self._global_step, self.waits = dict(run), global_step, True

    def forget(self) -> None:
        """Discard the pending state."""
        self._state = self._global_step = None
        self.waits = False

    def hand_over(self, run: RunRecorder, report: SinkFormatter, *, global_step: int, step: int, epoch: int) -> str:
        """Restore the pending state into a run. Must be called on each rank.

        Args:
            run: The run that resumes.
            report: The report, which receives the shown tags and the sites that had NaN or infinities.
            global_step: The trainer's ``global_step``. A state that was kept at a different step is discarded.
            step: The first step of the resumed run, as counted by ``self.log``.
            epoch: The epoch of that step.

        Returns:
            The reason why the state could not be restored, or an empty string.
        """
        state, kept_at = self._state, self._global_step
        self.forget()
        if state is None or kept_at not in (None, global_step):
            return ""
        try:
            if kept_at is None:
                if (state["version"], state["settings"]) != (_VERSION, self._settings):
                    return "its state in the checkpoint has other settings or another version"
                report.nonfinite |= {Site(*site) for site in state["nonfinite"]}
                report.load_state_dict(state.get("tags", {}))
                if not state.keys() - {"version", "settings", "nonfinite", "tags", "label"}:
                    return ""
            else:
                report.load_state_dict(state.get("tags", {}))
            run.load_state_dict(state, step, epoch)
        except (KeyError, TypeError, ValueError) as error:
            return f"its state in the checkpoint cannot be read: {describe_error(error)}"
        return ""
