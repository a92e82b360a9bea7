"""wattune finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows."""

__version__ = "0.1.0"
