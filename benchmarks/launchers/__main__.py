"""One kind, in a process of its own."""

from benchmarks.launchers import main

raise SystemExit(main())
