"""The version, where every room may read it without loading the public interface."""

__version__ = "0.1.0"
