"""Measures of detection and localisation, with their confidence intervals."""
