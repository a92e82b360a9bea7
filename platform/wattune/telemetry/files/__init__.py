"""Telemetry files: written beside the sampling thread, checked when read."""
