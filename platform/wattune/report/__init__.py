"""The report: one HTML file that shows a study's answer, what it rests on, and everything that was not chosen."""
