"""Coefficients of predictions, fitted to measurements."""
