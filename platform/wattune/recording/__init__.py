"""Recordings: a sampler beside any command, without Ray, and the figures that come of it."""
