"""Readings and spans as signals on one time axis."""
