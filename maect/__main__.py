"""`python -m maect` is the `maect` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the working folder, where others may write

from maect.cli import main

sys.exit(main())
