"""Metrics: one file per physical question."""
