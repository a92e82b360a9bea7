"""Readings of a running recording over HTTP, as metrics that Prometheus scrapes."""
