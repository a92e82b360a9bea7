"""MLflow: the study's results where people look for them. The study folder stays the truth; this only copies it."""
