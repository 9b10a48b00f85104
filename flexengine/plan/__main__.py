"""`python -m flexengine.plan` is `flexengine plan`, and `python -m flexengine.plan measure` is `flexengine measure`."""

import sys

from flexengine.commands.main import main

if __name__ == "__main__":
    measures = sys.argv[1:2] == ["measure"]
    sys.exit(main(sys.argv[1:] if measures else ["plan", *sys.argv[1:]]))
