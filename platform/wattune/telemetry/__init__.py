"""What reads sensors, and where the readings go."""
