"""`python -m flexengine` is `flexengine`."""

import sys

from flexengine.shell.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
