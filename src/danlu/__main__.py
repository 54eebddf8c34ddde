"""`python -m danlu` is `danlu`."""

from __future__ import annotations

import os
import sys

# Python puts the working directory in front of everything else for -m: a file there that is named like a module
# (tokenize.py) would take its place, here and in the processes that are started from here.
if not sys.flags.safe_path and sys.path[0] == os.getcwd() and not __file__.startswith(os.path.join(sys.path[0], "")):
    del sys.path[0]

from danlu.cli.main import main

sys.exit(main())
