"""Embeddings in, anomaly scores and maps out."""
