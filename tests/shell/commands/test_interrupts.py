"""Exit codes of commands that a signal ends."""

import signal

import pytest

from flexengine.shell.commands.interrupts import Interrupted, Interrupts


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
