"""From marks and readings to metrics: pure functions over tables."""
