"""Runs `opd` as `python -m megatron_opd`."""

from megatron_opd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
