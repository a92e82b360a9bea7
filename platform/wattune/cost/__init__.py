"""Predictions, never measurements."""
