"""`python -m megatron_opd` is `opd`."""

from megatron_opd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
