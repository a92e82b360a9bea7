"""Peak memory of a rank, part by part."""
