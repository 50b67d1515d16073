"""Inliers in, synthetic outliers out."""
