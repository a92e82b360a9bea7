"""Strategies: each chooses the kept candidate that is measured next, behind one ask/tell protocol."""
