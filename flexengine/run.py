"""`python -m flexengine.run`: generate text for a file of prompts; see `flexengine.commands.run`."""

import sys

from flexengine.commands.run import main

if __name__ == "__main__":
    sys.exit(main())
