"""What a configuration means: axes, degrees, validity, what engines do with it, and where its ranks run."""
