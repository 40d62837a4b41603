"""Prepares each program of ``lightning-recorder run``: Python imports a module of this name when it starts."""

import contextlib
import sys
from importlib import import_module
from pathlib import Path

sys.path[:] = [each for each in sys.path if each != str(Path(__file__).parent)]
# The environment may have a module of this name itself, which Python would have imported.
own = sys.modules.pop(__name__)
with contextlib.suppress(ModuleNotFoundError):
    import_module("sitecustomize")
sys.modules.setdefault("sitecustomize", own)  # the import of this module takes it from there
with contextlib.suppress(Exception):  # Python would show a traceback and go on
    from lightning_recorder.entry_point import see_other_trainers

    see_other_trainers()
