"""`python -m cs336_systems` is `cs336`."""

import sys

from cs336_systems.cli import main

sys.exit(main())
