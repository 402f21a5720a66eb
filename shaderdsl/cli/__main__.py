"""``python -m shaderdsl.cli``; ``python -m shaderdsl`` is the same."""

import sys

from . import main

sys.exit(main())
