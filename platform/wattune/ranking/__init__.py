"""From results to a decision: trials are assessed, ranked and compared, with their evidence."""
