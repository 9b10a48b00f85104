"""`python -m flexengine.plan` is `flexengine plan`, and `python -m flexengine.plan measure` is `flexengine measure`."""

import sys

from flexengine.shell.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
