"""Step time of candidates, computed from kernels, links and schedules."""

from wattune.cost.step_time.predict import predict

__all__ = ["predict"]
