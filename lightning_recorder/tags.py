"""How a statistic is called where it is shown."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["make_tag"]


@lru_cache(maxsize=1 << 15)  # the same ones come with every record
def make_tag(group: str, name: str, path: str, statistic: str = "") -> str:
    """The tag of a site's statistic.

    It is ``group/name/statistic``, or ``group/name/path/statistic`` for a tensor inside a nested output.

    Args:
        group: ``activations``, ``gradients``, …; TensorBoard folds the page by it.
        name: The module's dotted name; the root, which has none, is called ``(root)``.
        path: The tensor's path; ``out``, the whole output, is left out.
        statistic: The statistic's name; without one the tag is that of the site.

    Example:
        >>> make_tag("activations", "encoder.conv1", "out", "mean")
        'activations/encoder.conv1/mean'
        >>> make_tag("gradients", "encoder.lstm", "out[1][0]", "rms")
        'gradients/encoder.lstm/out[1][0]/rms'
    """
    inner = "" if path == "out" else path
    # A slash in a name would open a level of its own on the page.
    tag = "/".join(part.replace("/", "_") for part in (group, name or "(root)", inner, statistic) if part)
    # Half of a surrogate pair is a valid attribute name in Python and no valid text in a file.
    return tag.encode("utf-8", "replace").decode("utf-8")
