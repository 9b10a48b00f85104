"""Exit codes of commands that a signal ends."""

import signal
import subprocess
import sys
import time

import pytest

from flexengine.shell.commands.interrupts import Interrupted, Interrupts


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_results_and_gives_the_code_of_shells(number: signal.Signals, code: int) -> None:
    saved = list[str]()
    before = signal.getsignal(number)
    interrupts = Interrupts()
    guard = interrupts.guarding(lambda: saved.append("saved"), lambda: "1 of 2 rows done")
    with pytest.raises(Interrupted, match=number.name) as caught, interrupts, guard:
        signal.raise_signal(number)
    assert (caught.value.code, saved, interrupts.standing()) == (code, ["saved"], "1 of 2 rows done")
    assert signal.getsignal(number) is before


# A command in a process of its own, whose last steps take long: of Python, and of a library that closes.
COMMAND = """
import atexit, sys, time
from flexengine.shell.commands import interrupts, messages

class Library:
    def __del__(self, sleep=time.sleep):
        sleep(0.05)

def command(words, running):
    with running.guarding(lambda: None, lambda: "1 of 2 rows done"):
        print("now", flush=True)
        time.sleep(float(words[0]))
    return 0

interrupts.end_with_process()
atexit.register(time.sleep, 0.05)
library = Library()
sys.exit(messages.interruptible(command)(sys.argv[1:]))
"""


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("seconds", [0.0, 0.01, 1000.0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_many_signals_at_the_end_of_a_command(number: signal.Signals, seconds: float) -> None:
    words = [sys.executable, "-c", COMMAND, str(seconds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "now\n"
        while child.poll() is None:
            child.send_signal(number)
            time.sleep(0.002)
        said = child.stderr.read()
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert child.returncode in ({0, 128 + number} if seconds < 0.1 else {128 + number})
    assert said.count("1 of 2 rows done") == 1 or seconds < 0.1
