"""Devices and models that exist, each constant with its source."""
