"""Compares the tokens of a student with those of a teacher of another tokenizer. Numpy only."""
