"""The report: one HTML file with a study's answer, its evidence, and everything that was not chosen."""
