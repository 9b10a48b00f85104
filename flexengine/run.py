"""`python -m flexengine.run` is `flexengine run`."""

import sys

from flexengine.shell.commands.run import main

if __name__ == "__main__":
    sys.exit(main())
