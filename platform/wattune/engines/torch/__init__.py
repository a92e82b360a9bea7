"""The reference engine, on torch's own parallel libraries."""
