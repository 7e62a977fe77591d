"""Samples on other sites, far from the learner: their own versions of the weights, a slow link."""
