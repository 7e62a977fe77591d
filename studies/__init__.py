"""Studies: each answers a question about learning or prediction, with controls and intervals."""
