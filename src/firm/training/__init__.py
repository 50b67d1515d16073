"""Positive sets, losses, batches, the loop and its runs."""
