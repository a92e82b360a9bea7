"""Lanes: warm workers that run one trial after another."""
