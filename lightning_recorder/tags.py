"""Tags: the names of statistics in sinks."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["make_tag"]


@lru_cache(maxsize=1 << 15)  # the same tags recur in every record
def make_tag(group: str, name: str, path: str, statistic: str = "") -> str:
    """Return the tag of a site's statistic.

    The tag is ``group/name/statistic``, or ``group/name/path/statistic`` for a tensor inside a nested output.

    Args:
        group: ``activations``, ``gradients``, …; TensorBoard groups its page by it.
        name: The module's dotted name; the root, whose name is empty, becomes ``(root)``.
        path: The tensor's path; ``out``, the whole output, is omitted.
        statistic: The statistic's name; if empty, the result is the tag of the site.

    Example:
        >>> make_tag("activations", "encoder.conv1", "out", "mean")
        'activations/encoder.conv1/mean'
        >>> make_tag("gradients", "encoder.lstm", "out[1][0]", "rms")
        'gradients/encoder.lstm/out[1][0]/rms'
    """
    inner = "" if path == "out" else path
    # A slash in a name would open another level on the page.
    tag = "/".join(part.replace("/", "_") for part in (group, name or "(root)", inner, statistic) if part)
    # A lone surrogate is a valid attribute name in Python but not valid text in a file.
    return tag.encode("utf-8", "replace").decode("utf-8")
