"""Frames between the driver and a stage.

| kind | from | body |
|---|---|---|
| CHOOSE | driver | a JobOrder without a policy; answered by ANSWER with a policy |
| LAY_OUT | driver | a JobOrder; answered by ANSWER if the job fits |
| PREPARE | driver | a JobOrder; answered by ANSWER with the stage's pools |
| SWEEP | driver | an Order; answered by RESULT |
| END | driver | nothing; the job ends, early or not; answered by ANSWER with what the stage has measured |
| LEAVE | driver | nothing; the process ends |
| ANSWER | stage | a dict; `number` is the kind of the order |
| FAILED | stage | a dict: the error |
| RESULT | stage | a StageResult |

`number` of SWEEP and RESULT is the number of the sweep.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from flexengine.config import SamplingParams
from flexengine.engine.stages import Sweep
from flexengine.guests.stages.frames import FIRST_KIND
from flexengine.plan.workload import Workload
from flexengine.schedule import sweeps
from flexengine.worker.row_sequence import RowSequence

LAYOUT = 2  # of frames; raise it with every change of them
# Sampling parameters that choose a token. The driver ends sequences, so it alone needs the others.
CHOOSING = ("seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "logprobs")  # fmt: skip
# Kinds of frames; see the table.
OrderKind = enum.IntEnum(
    "OrderKind", "CHOOSE LAY_OUT PREPARE SWEEP END LEAVE ANSWER FAILED RESULT", start=FIRST_KIND + 1
)


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """A job that a stage plans or prepares."""

    workload: Workload  # sizes of the rows
    lossy: dict[str, Any]  # the lossy switches that are set
    policy: dict[str, Any]  # policy of the first stage; empty where the stage chooses one
    given: bool = False  # whether the user gave the policy, so that weights are placed as it says in all stages
    block: int | None = None  # most sequences alive, for the choice of a policy; None for free choice
    prefill_tokens: int | None = None  # most tokens of a prefill chunk; None for free choice
    lost: Sequence[str] = ()  # places of attention workers that are replaced first


class Event(NamedTuple):
    """Pages of a sequence that are claimed or released."""

    sequence: int  # number of the sequence
    home: str  # its place
    cached: int  # tokens whose KV is stored
    source: int | None  # number of the trunk whose pages it shares; None if there is none
    tokens: int | None  # tokens to hold; None if the pages are released

    @staticmethod
    def of(sequence: sweeps.Sequence, tokens: int | None) -> "Event":
        """Return the event of a sequence as it is at this time."""
        source = sequence.source.id if sequence.source is not None else None
        return Event(sequence.id, sequence.home, sequence.cached, source, tokens)

    def claimant(self) -> sweeps.Sequence:
        """Return the sequence, with all that claims and releases read of it."""
        sequence = sweeps.Sequence(self.sequence, 0, 0, cached=self.cached, home=self.home)
        if self.source is not None:
            sequence.source = cast("None", sweeps.Sequence(self.source, 0, 0))
        return sequence


class SentText(NamedTuple):
    """A text that a stage does not have yet; see `RowSequence`."""

    row: int
    sample: int
    prompt: tuple[int, ...]
    targets: tuple[int, ...]
    sampling: dict[str, Any]  # values of CHOOSING

    @staticmethod
    def of(text: RowSequence) -> "SentText":
        """Return what a stage needs of a text."""
        sampling = {name: getattr(text.sampling, name) for name in CHOOSING}
        return SentText(text.row, text.sample, text.prompt, text.targets, sampling)

    def sequence(self, number: int) -> RowSequence:
        """Return the sequence with all that computing reads of it. number: of the sequence."""
        sampling = SamplingParams(**self.sampling)
        sequence = RowSequence(number, 0, 0, row=self.row, sample=self.sample, sampling=sampling)
        sequence.prompt, sequence.targets = self.prompt, self.targets
        return sequence


class Order(NamedTuple):
    """A sweep for a stage in another process, with all that has changed since the last sweep."""

    sweep: Sweep  # the sweep
    events: list[Event]  # claims and releases of pages, in order
    texts: dict[int, SentText]  # by sequence, texts that the stage does not have yet
    grown: dict[int, Sequence[int]]  # by sequence, tokens that were generated since the last order
