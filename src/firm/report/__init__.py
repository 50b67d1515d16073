"""Results -> something to look at."""
