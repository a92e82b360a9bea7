"""From spans and readings to metrics: pure functions over tables."""
