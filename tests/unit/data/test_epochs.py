"""Where in which epoch a prompt lies while its source grows and changes."""


def walked(prompts: int, events: dict[int, tuple[str, int]], most: int) -> list[tuple[int, int]]:
    """An obvious walk: prompt by prompt, one epoch after another."""
    found, epoch, position, later = [], 0, 0, None
    for drawn in range(most):
        kind, count = events.get(drawn, (None, 0))
        if kind == "grown":
            later = count
        elif kind == "changed":
            prompts, later = count, None
        if position >= prompts or (position == 0 and later is not None):
            if position:
                epoch, position = epoch + 1, 0
            prompts, later = later or prompts, None
        found.append((epoch, position))
        position += 1
