"""Copies of a study's results in MLflow. The study folder is the record; this package only copies it."""
