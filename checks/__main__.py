"""`python -m checks NAME`, see harness/driver.py."""

from harness.driver import main

raise SystemExit(main("checks"))
