"""Entry point of ``python -m lightning_recorder``."""

from __future__ import annotations

import sys

from lightning_recorder.commands import main

if __name__ == "__main__":
    sys.exit(main())
