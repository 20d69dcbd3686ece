"""`python -m maect` is the `maect` command."""

import sys

from maect.cli import main

sys.exit(main())
