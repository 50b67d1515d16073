"""FIRM: visual anomaly detection from good images alone."""

__version__ = "0.1.0"
