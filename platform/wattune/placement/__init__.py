"""Places of a plan's parts: a map of device slots, the exact best placement on it, and whether that pays."""
