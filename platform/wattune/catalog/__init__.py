"""What exists: devices and models, each constant with its source."""
