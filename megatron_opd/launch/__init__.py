"""Lays the processes of a run out over machines; it starts none of them and needs no torch."""
