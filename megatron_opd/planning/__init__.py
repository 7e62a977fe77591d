"""What a configuration costs, from config.json alone: no weights, no torch, no processes."""
