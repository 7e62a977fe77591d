"""The `opd` program: the only place that wires concrete parts together and reads os.environ."""
