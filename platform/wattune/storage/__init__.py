"""Where studies are kept: the study folder and its files, and the same at a URL."""
