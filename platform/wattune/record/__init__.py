"""Recordings: a sampler beside any command, without Ray, and what it shows."""
