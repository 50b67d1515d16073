"""One image in, a positive pair out."""
