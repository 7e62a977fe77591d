"""Makes SGLang serve the language model of a published class as its text class.

SGLang's own class has a vision tower, which no text goes through, and asks for processors of
images; text is what learner and transformers were compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang_bridge.language_models import OF_ALL, PUBLISHED


def around_parse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the configuration of the language model where a class of PUBLISHED was asked for."""
    config = original(*args, **kwargs)
    found = PUBLISHED.get(config.model_type)
    if found is None or config.architectures != [found.architecture]:
        return config
    text = copy.deepcopy(config.text_config)
    text.architectures, text._name_or_path = [found.text_class], config._name_or_path
    for key in OF_ALL:
        if getattr(config, key, None) is not None:
            setattr(text, key, getattr(config, key))
    return text
