"""Says how large a sample is, to the controller and to the fakes."""

LARGEST = 1 << 30
TOKENS, IDS_A_TOKEN = 4096, 14
