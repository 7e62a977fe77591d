"""Starts and ends the processes of a run: on this machine, in a Slurm job, on a Ray cluster."""
