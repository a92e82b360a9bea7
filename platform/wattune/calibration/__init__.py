"""Calibration: known loads beside a sampler, and what the sensors made of them."""
