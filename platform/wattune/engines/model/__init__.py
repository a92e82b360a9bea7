"""The model every engine trains: its layers, experts, adapters, initial weights and tokens."""
