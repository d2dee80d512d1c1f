"""The version, where whoever builds the package reads it without importing torch."""

__version__ = "0.1.0"
