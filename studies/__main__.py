"""`python -m studies NAME`, see harness/driver.py."""

from harness.driver import main

raise SystemExit(main("studies"))
