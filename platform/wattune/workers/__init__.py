"""What trains: engines, the measuring loop, and the spans of when each rank was in which phase."""
