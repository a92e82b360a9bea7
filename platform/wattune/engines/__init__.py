"""Engines that train, one package each, and the model they share. No engine knows another."""
