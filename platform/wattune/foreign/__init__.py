"""Logs that other tools wrote, as recordings: their columns, units and clocks become those of `wattune.schema`."""
