"""From results to a decision: trials judged, put in order, laid side by side, with what they rest on."""
