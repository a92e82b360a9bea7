"""Settings that every unit test may count on."""

from hypothesis import settings

# A machine shared with other work may take any time for an example.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")
