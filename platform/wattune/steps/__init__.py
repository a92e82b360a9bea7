"""Steps of a program that wattune did not write: how it tells them, and how a launcher reads them."""
