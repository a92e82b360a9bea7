"""Step time of candidates, computed from kernels, links and schedules."""
