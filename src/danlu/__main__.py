"""`python -m danlu` is `danlu`."""

from __future__ import annotations

import sys

from danlu.cli.main import main

sys.exit(main())
