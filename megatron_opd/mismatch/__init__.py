"""Measures how far the learner's and the sampler's probabilities are apart (`opd mismatch`)."""
