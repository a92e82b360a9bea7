"""Simulated sensors: device physics, activity, and the tables real sensors would have given."""
