"""Encoders, backbones, heads and adaptors."""
