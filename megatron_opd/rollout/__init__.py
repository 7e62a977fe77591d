"""Samples the student's responses and has the teachers score them, on their SGLang servers."""
