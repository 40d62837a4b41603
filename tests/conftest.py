"""Settings of all tests."""

from hypothesis import settings

# Every run has the same examples: a failure is of the change at hand. `--hypothesis-profile=search` draws others.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")
