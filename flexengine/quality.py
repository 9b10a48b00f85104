"""`python -m flexengine.quality`: measure what lossy choices cost; see `flexengine.commands.quality`."""

import sys

from flexengine.commands.quality import main

if __name__ == "__main__":
    sys.exit(main())
