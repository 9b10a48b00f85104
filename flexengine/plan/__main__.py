"""`python -m flexengine.plan`: choose and explain a policy without loading weights; see `flexengine.commands.plan`."""

import sys

from flexengine.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
