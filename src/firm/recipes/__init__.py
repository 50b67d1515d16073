"""Experiments as values: the recipe, its presets, and the tables made of it."""
