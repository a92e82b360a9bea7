"""Measured runs at another number of devices: step, speed, energy and power of a plan on more nodes."""
