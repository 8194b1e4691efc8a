"""``python -m lmcache_persist.cli``."""

import sys

from lmcache_persist.cli import main

sys.exit(main())
