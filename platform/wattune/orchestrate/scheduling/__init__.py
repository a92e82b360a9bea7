"""Scheduling: which trial runs next, on which nodes, within which budget. No Ray here."""
