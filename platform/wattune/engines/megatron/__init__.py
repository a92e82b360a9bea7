"""The Megatron-Core engine."""
