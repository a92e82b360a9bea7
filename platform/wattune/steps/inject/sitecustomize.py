"""Skeleton; the hooks follow."""
