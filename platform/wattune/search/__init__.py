"""From a search space file to specifications, and who is next."""
