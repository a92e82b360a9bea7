"""Calibration: known loads beside a sampler, and the properties of its sensors that follow."""
