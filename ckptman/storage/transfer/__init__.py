"""Copies from place to place: bytes moved, read back, and only then counted; drains to tiers. No torch."""
