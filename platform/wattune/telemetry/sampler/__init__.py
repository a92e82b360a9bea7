"""The sampler process: its owner's end, its loop, its lease."""
