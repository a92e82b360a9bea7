"""Settings of devices: set under a lease, by one owner a device, and restored whoever dies."""
