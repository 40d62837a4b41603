"""Version of the package; the build reads it from this file."""

__all__ = ["__version__"]

__version__ = "0.2.0"
