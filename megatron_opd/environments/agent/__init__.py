"""Lets a program of the user's play trajectories, through an OpenAI-compatible endpoint."""
