"""Runs the conformance checks; see main.py."""

from sglang_bridge.conformance.main import main

if __name__ == "__main__":
    raise SystemExit(main())
