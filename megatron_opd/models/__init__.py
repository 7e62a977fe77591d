"""What models are made of: families, shapes, and where every parameter lies."""
