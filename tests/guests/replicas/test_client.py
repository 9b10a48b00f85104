"""The first engine's side of replicas, with replicas whose answers are given or damaged."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine.errors import InvalidInput, StageLost
from flexengine.guests.replicas.client import Replica, Replicas, check_engines
from flexengine.guests.replicas.messages import HiddenInput, ReplicaKind, SliceInput, SliceResult, packed_tensors
from flexengine.guests.replicas.server import serve
from flexengine.guests.stages.remote import failure
from flexengine.guests.wire.link import Connection
from flexengine.lossy import EXACT
from flexengine.policy import Policy

ATTENDED = torch.zeros(1, 1, 2, 4)


class Answered(Replica):
    """A replica without a process: the test has its end of the connection."""

    def _start(self, threads: int) -> socket.socket:
        own, other = socket.socketpair()
        self.other, self.ended = Connection(other), False
        return own

    def _end(self) -> str:
        self.ended = True
        self.other.close()
        return "its own reason"


@contextmanager
def replicas(engines: int) -> Iterator[Replicas]:
    made = object.__new__(Replicas)
    made.engines, made.members, made._loaded = engines, [Answered(n, engines, 1) for n in range(1, engines)], None
    with closing(made):
        yield made


def finished(made: Replicas, *answers: tuple[ReplicaKind, Any]) -> None:
    """Answer, as the first replica."""
    for kind, parts in answers:
        made.members[0].other.send(kind, (), *parts)  # type: ignore[attr-defined]


def result(batch: int, number: int, tensors: int = 3) -> tuple[ReplicaKind, Any]:
    values = SliceResult(batch, number, 1.0, None)
    return ReplicaKind.RESULT, list(packed_tensors(values, [torch.full((2,), float(number))] * tensors))


def interrupted(patch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    """Call, and let Ctrl-C come while the answer is awaited."""

    def interrupt(self: Connection) -> Any:
        raise KeyboardInterrupt

    with patch.context() as there:
        there.setattr(Connection, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_answers_of_an_interrupted_load_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next load waits for its own answer, not for that of the one before."""
    layout: Any = SimpleNamespace(policy=Policy(1, 2, cache={"workers": 1}))
    with replicas(2) as made:
        interrupted(monkeypatch, lambda: made.load(layout, EXACT))
        failed = list(packed_tensors(failure(InvalidInput("too late")), ()))
        finished(made, (ReplicaKind.FAILED, failed), (ReplicaKind.DONE, ()))
        made.load(layout, EXACT)
        assert not made.members[0].owed
        assert not made.members[0].connection.readable(0)


def test_answers_of_an_interrupted_slice_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with replicas(2) as made:
        for batch in (0, 1):
            made.request(1, SliceInput(batch, 1, False), ATTENDED)
        interrupted(monkeypatch, lambda: made.answer(1, 0, 1))
        finished(made, result(0, 1), result(1, 1), result(0, 7))
        made.begin()
        made.request(1, SliceInput(0, 7, False), ATTENDED)
        assert made.answer(1, 0, 7).tensors[0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (
            (ReplicaKind.RESULT, [torch.zeros(9, dtype=torch.uint8)]),
            "a message is no _Parts",
        ),
        (result(0, 2), "slice 2 of gpu_batch 0 .* came where slice 1 of gpu_batch 0 was due"),
        (result(0, 1, tensors=2), "with 2 tensors came"),
        ((ReplicaKind.DONE, ()), "kind 33 came where 32 was due"),
    ],
)
def test_a_damaged_answer_loses_the_engine(answer: tuple[ReplicaKind, Any], fault: str) -> None:
    """In a message that names it, and shows its own reason. Nothing more is sent to it."""
    with replicas(2) as made:
        made.request(1, SliceInput(0, 1, False), ATTENDED)
        finished(made, answer)
        with pytest.raises(StageLost, match=fault) as caught:
            made.answer(1, 0, 1)
        assert "its own reason" in str(caught.value)
        made.drain()
        with pytest.raises(StageLost):
            made.begin()


def test_engines_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is open any more when the first process is awaited."""
    at_end, end = list[list[int]](), Answered._end

    def noted(self: Answered) -> str:
        at_end.append([each.connection._socket.fileno() for each in made.members])
        return end(self)

    monkeypatch.setattr(Answered, "_end", noted)
    with replicas(4) as made:
        pass
    assert at_end == [[-1, -1, -1]] * 3
    assert all(each.ended for each in made.members)  # type: ignore[attr-defined]


def test_a_replica_says_why_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    own, other = socket.socketpair()
    with closing(Connection(own)) as connection:
        connection.send(ReplicaKind.HIDDEN, (), *packed_tensors(HiddenInput(0), (torch.zeros(1, 2), ATTENDED)))
        serve(other)
    assert "the connection to the first engine: a message came before the model was opened" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engines", "workers", "device", "fault"),
    [
        (4, 1, "cuda", "--engines is 4, but torch sees 3 GPUs, and each engine holds all weights on one"),
        (4, 1, "auto", "give --engines 3 or less, or --device cpu"),
        (2, ["cuda:2", "cuda:1"], "cuda", "--attention-workers names cuda:1, but the engines are on cuda:0 to cuda:1"),
        (2, ["cuda"], "cuda", "--attention-workers names cuda, but"),
        (3, 1, "cuda", ""),
        (2, ["cuda:2", "cpu"], "cuda", ""),
        (2, ["10.0.0.2:29600"], "cuda", ""),
        (4, ["cuda:1"], "sim", ""),
    ],
)
def test_engines_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, engines: int, workers: Any, device: str, fault: str
) -> None:
    monkeypatch.setattr("flexengine.tier.machine.has_gpu", lambda: True)
    monkeypatch.setattr("flexengine.tier.cuda.visible_gpus", lambda: 3)
    options: Any = SimpleNamespace(engines=engines, group=None, attention_workers=workers, device=device)
    if not fault:
        check_engines(options)
        return
    with pytest.raises(InvalidInput, match=fault):
        check_engines(options)
