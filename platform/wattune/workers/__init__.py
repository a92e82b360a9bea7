"""What trains: engines, the measuring loop, and the marks of when each rank was in which phase."""
