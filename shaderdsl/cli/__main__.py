"""``python -m shaderdsl.cli``."""

import sys

from . import main

sys.exit(main())
