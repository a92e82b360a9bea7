"""Sensors: the backends that read them, the sampler process, and the files it writes."""
