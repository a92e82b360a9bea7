"""The meaning of a configuration: axes, degrees, validity, its effect in each engine, and the place of its ranks."""
