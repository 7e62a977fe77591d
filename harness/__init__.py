"""What checks, studies and benchmarks share: the driver, headers, kept rows, random models."""
