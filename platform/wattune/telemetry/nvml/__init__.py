"""NVIDIA devices through their driver's library."""
