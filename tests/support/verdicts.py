"""Verifiers that a model with random weights satisfies now and then."""


def is_of_even_length(response: str, answer: str) -> bool:
    """Half of all responses are right, whatever the answer."""
    return len(response) % 2 == 0
