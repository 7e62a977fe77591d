"""Student rollouts through the inference fleet."""
