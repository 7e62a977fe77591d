"""One kind, in a process of its own."""

from checks.launchers import main

raise SystemExit(main())
