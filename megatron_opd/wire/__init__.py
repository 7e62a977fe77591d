"""Connects processes over ZeroMQ: who may connect, with which keys; a link that delivers once."""
