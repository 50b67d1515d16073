"""A detector on the line."""
