"""Scores in, PASS, REVIEW or FAIL out."""
