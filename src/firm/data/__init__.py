"""Sets of images: readers, duplicates, splits, checks."""
