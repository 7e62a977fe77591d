"""Judges responses many at once, whatever a verifier does."""
