"""Connects the processes of a run over ZeroMQ: who may connect, with which keys."""
