"""``python -m prefixroute.cli``: the command line without its script."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
