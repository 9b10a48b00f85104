"""A command whose job finishes rows slowly, so that tests can kill it in between."""

from collections.abc import Sequence

_CODE = """import sys, time
from flexengine.job.journal import Journal
add = Journal.add
def slow(journal, result):
    add(journal, result)
    time.sleep({seconds})
Journal.add = slow
from flexengine.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


def slow_command(words: Sequence[str], seconds: float) -> list[str]:
    """Return the Python options and arguments that run `flexengine` with a pause after each finished row.

    Args:
        words: command line, from the command's name on.
        seconds: length of the pause.
    """
    return ["-c", _CODE.format(seconds=seconds), *words]
