"""Runs `opd` as `python -m megatron_opd`."""

from megatron_opd.cli.main import console

if __name__ == "__main__":
    raise SystemExit(console())
