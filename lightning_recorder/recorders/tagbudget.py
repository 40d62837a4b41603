"""Which sites the loggers get, where there are more tags than a page bears."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_recorder.errors import tell
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["TagBudget"]


class TagBudget:
    """Chooses sites, evenly spread over the model, so that they have no more than a number of tags.

    A site that was chosen once is in every record, one that was not in none.

    Args:
        max_tags: The most tags.
        name: What the warning calls the recorder.
    """

    def __init__(self, max_tags: int, name: str = "the recorder") -> None:
        self.max_tags = max_tags
        self._name = name
        self._chosen: set[Site] = set()
        self._left_out: set[Site] = set()

    def clear(self) -> None:
        """Forget what was chosen, for another run."""
        self._chosen.clear()
        self._left_out.clear()

    def within(self, found: Mapping[Site, SiteStatistics], tags_per_site: int) -> Mapping[Site, SiteStatistics]:
        """Those of the sites that were chosen.

        Args:
            found: All sites of a record.
            tags_per_site: How many tags one has.
        """
        new = [site for site in found if site not in self._chosen and site not in self._left_out]
        if new:
            self._choose(new, self.max_tags // max(1, tags_per_site) - len(self._chosen))
        if not self._left_out:
            return found
        return {site: seen for site, seen in found.items() if site in self._chosen}

    def _choose(self, new: list[Site], room: int) -> None:
        room = max(0, min(room, len(new)))
        chosen = {new[place * len(new) // room] for place in range(room)}
        was_told = bool(self._left_out)
        self._chosen |= chosen
        self._left_out |= set(new) - chosen
        if self._left_out and not was_told:
            total = len(self._chosen) + len(self._left_out)
            tell(
                f"{self._name} shows {len(self._chosen)} of {total} sites in the loggers, which is what "
                f"max_tags={self.max_tags} has room for; the files of records have all. Select fewer modules, show "
                "fewer statistics, or raise max_tags"
            )
