"""Storage of studies: the study folder with its files, and the same at a URL."""
