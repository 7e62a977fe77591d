"""Teacher scores through the inference fleet."""
