"""``python -m lmcache_persist.cli``."""

import sys

from lmcache_persist.cli.app import main

sys.exit(main())
