"""Several engines on one attention worker: memory and processors are shared, and no connection delays another."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams
from flexengine.engine.recovery import exhausted
from flexengine.errors import OutOfMemory, RanOut, WorkerLost
from flexengine.guests.attention_workers.client import Client, PendingAnswer
from flexengine.guests.attention_workers.devices import identity
from flexengine.guests.attention_workers.messages import PROTOCOL, MessageKind, WorkerQuestion, WorkerTables, text
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.workers import PURPOSE, RemoteWorker, WorkerTier, connecting
from flexengine.guests.wire import link as links
from flexengine.guests.wire.link import Connection, pack
from flexengine.guests.wire.secret import connect
from flexengine.plan.workload import Workload
from flexengine.runtime.execute import Shortage
from tests.helpers.attention_workers import listening
from tests.helpers.families import NEW
from tests.helpers.patience import PATIENCE, until

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
MEMORY = 1 << 20
SHAPE = dict(start=0, page_tokens=1, bits=0, pool_dtype=0, dtype=0, batch=0, group=0, scale=1.0)  # fmt: skip


@pytest.fixture
def worker() -> Iterator[tuple[str, list[str]]]:
    """Address of a worker with MEMORY, and its messages."""
    with listening(MEMORY) as found:
        yield found


def question(client: Client, width: int) -> Callable[[], PendingAnswer]:
    """Return a function that asks for attention over one token of one head, whose answer has 4 * width bytes."""
    handle = client.allocate(8 * width)
    assert handle is not None
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    client.tables(0, 0, WorkerTables(zero.view(1, 1), one, one, zero, zero, zero, torch.empty(0, 2, dtype=torch.int32)))
    ask = WorkerQuestion(handle=handle, pages=1, heads=1, kv_heads=1, head_dim=width, **SHAPE)  # type: ignore[arg-type]
    values = torch.arange(3.0 * width)

    def send() -> PendingAnswer:
        return client.ask(0, ask, values.view(torch.uint8), torch.empty(width).view(torch.uint8))

    return send


def answered(pending: PendingAnswer, width: int) -> bool:
    """Attention over a single token is its value, which came third."""
    pending.wait()
    return torch.equal(pending.targets[0].view(torch.float32), torch.arange(2.0 * width, 3.0 * width))


def test_one_engine_measures_at_a_time(worker: Any) -> None:
    """An engine that dies while it measures stops no other."""
    address, order = worker[0], list[str]()
    first, second = (RemoteWorker("worker1", address) for _ in range(2))

    def measure() -> None:
        with second.alone():
            order.append("second")

    with suppress(WorkerLost), first.alone():
        (thread := threading.Thread(target=measure)).start()
        handle = first.allocate(64)
        assert handle is not None
        time.sleep(0.1)
        order.append("first")
        first.link.close()
    thread.join(30)
    assert order == ["first", "second"]
    first.close()
    second.close()


def test_memory_and_order_of_work() -> None:
    pool, done = WorkerPool(100), list[int]()
    assert [pool.take(60), pool.take(41), pool.take(40), pool.take(1)] == [True, False, True, False]
    pool.give_back(60)
    assert (pool.memory, pool.taken) == (100, 40)
    futures = [pool.thread.submit(lambda i=i: done.append(i)) for i in range(50)]
    for future in futures:
        future.result()
    assert done == list(range(50))
    assert not pool.thread.submit(torch.is_grad_enabled).result()
    pool.close()


def test_two_engines_at_once(families: Any) -> None:
    """Both are in the middle of their jobs at the same time, under different policies; tokens are those of one
    process."""
    names, found = ("llama", "gpt-oss"), dict[str, list[list[int]]]()
    policies = {
        "llama": Policy(4, 2, cache={"workers": 1}),
        "gpt-oss": Policy(2, 3, cache={"workers": 0.7, "device": 0.3}),
    }
    known, met, both = {name: families(name) for name in names}, threading.Barrier(2), list[str]()
    with listening(8 << 20) as (address, said):

        def run(name: str) -> None:
            def meet(progress: Any) -> None:
                if progress.sweeps in (2, 4):
                    met.wait(60)
                if progress.sweeps == 3:
                    both.append(name)

            with Engine(known[name].directory, policy=policies[name], device="cpu", attention_workers=[address],
                        on_sweep=meet) as engine:  # fmt: skip
                found[name] = [r.token_ids for r in engine.generate(known[name].rows, GREEDY)]
                assert engine.summary.bytes["worker1_send"] > 0

        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(both) == sorted(names)
        until(lambda: sum("has ended" in line for line in said) == 2)
    assert found == {name: known[name].expected for name in names}


def test_engines_share_the_memory(worker: Any) -> None:
    address, _ = worker
    with ExitStack() as stack:
        first = RemoteWorker("worker1", address)
        stack.callback(first.close)
        assert (first.memory, first.others) == (MEMORY, 0)
        handle = first.allocate(MEMORY - (1 << 16))
        assert handle is not None
        second = WorkerTier(connecting(address), "worker1")
        stack.callback(second.close)
        assert (second.ledger.capacity, second.client.others) == (1 << 16, MEMORY - (1 << 16))
        third = WorkerTier(connecting(address), "worker1")
        stack.callback(third.close)
        region = second.allocate(1 << 15, "KV cache")
        third.allocate(1 << 14, "KV cache")
        with pytest.raises(OutOfMemory, match=r"KV cache, as other engines hold 1\.02 MB of the worker needs"):
            third.allocate(1 << 15, "KV cache")
        second.free(region, "KV cache")
        until(lambda: third.client.allocate(1 << 15) is not None)
        rest = third.client
        assert rest.others == MEMORY - (1 << 16)
        assert rest.allocate(1 << 14) is not None
        with pytest.raises(OutOfMemory, match=r"other engines hold all memory of worker1 .* run the same command"):
            RemoteWorker("worker1", address)


def test_an_engine_says_that_others_hold_the_memory(families: Any, worker: Any) -> None:
    """The job was planned while the memory was free; then another engine took it."""
    (address, said), known = worker, families("llama")
    other = RemoteWorker("worker1", address)
    with Engine(known.directory, policy=Policy(8, 1, cache={"workers": 1}), device="cpu",
                attention_workers=[address]) as engine:  # fmt: skip
        handle = other.allocate(MEMORY - 4096)
        assert handle is not None
        why = r"worker1 memory ran out: there was no room for KV cache, as other engines hold 1\.04 MB of the"
        with pytest.raises(RanOut, match=why):
            engine.generate(known.rows, GREEDY)
        other.free(handle)
        other.close()
        until(lambda: any("has ended" in line for line in said))  # its memory is given back
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


def test_only_the_worker_that_is_short_shrinks(families: Any, worker: Any) -> None:
    """Its budget becomes less than what was booked there; RAM keeps its capacity."""
    (address, _), known = worker, families("llama")
    with Engine(known.directory, device="sim", device_mem="8M", host_mem="40M",
                attention_workers=[address]) as engine:  # fmt: skip
        work, before = Workload.of([(20, 8)] * 40), engine.core.machine.capacity
        layout = engine.planner.layout_under(Policy(4, 2, cache={"workers": 1}), work)
        engine.planner.smaller(work, layout, "worker1", 0, None)
        after = engine.core.machine.capacity
        assert (after.device, after.host) == (before.device, before.host)
        assert layout.total("worker1") * 3 / 4 <= after.workers[0] < layout.total("worker1")
        lack = Shortage("worker1", "KV cache", 0)
        assert "end other engines that use the worker" in str(exhausted(lack, layout, 1))


def test_no_connection_delays_another(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sends nothing, another reads no answers, and counts as lost later only; a third is served before."""
    monkeypatch.setattr(links, "SILENT_SECONDS", 10 * PATIENCE)
    address, said = worker
    host, port = address.split(":")
    with ExitStack() as stack:
        silent = socket.create_connection((host, int(port)))
        stack.callback(silent.close)
        deaf = Connection(connect((host, int(port)), PATIENCE, PURPOSE))
        stack.callback(deaf.close)
        deaf.send(MessageKind.HELLO, (PROTOCOL, 7), text(identity()))
        width = 1 << 14
        deaf.send(MessageKind.ALLOCATE, (0, 8 * width))
        deaf.send(MessageKind.TABLES, (0, 0, 1, 1, 0), torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.int32))
        ask = pack(WorkerQuestion(handle=0, pages=1, heads=1, kv_heads=1, head_dim=width, nbytes=12 * width, **SHAPE))  # type: ignore[arg-type]
        for ticket in range(300):  # answers of 20 MB, more than the system keeps for a connection
            deaf.send(MessageKind.ASK, (ticket, 0, len(ask)), ask, torch.zeros(3 * width))
        client = RemoteWorker("worker1", address)
        stack.callback(client.close)
        send = question(client, 64)
        assert all(answered(pending, 64) for pending in [send() for _ in range(20)])
        assert sum("serving" in line for line in said) == 2
        assert not any("lost" in line for line in said)


def test_a_lost_connection_frees_its_pages(worker: Any) -> None:
    address, said = worker
    lost = RemoteWorker("worker1", address)
    assert lost.allocate(MEMORY) is not None
    lost.link.close()
    until(lambda: any("is lost" in line for line in said))
    client = RemoteWorker("worker1", address)
    assert client.allocate(MEMORY) is not None
    client.close()
    lost.close()


def test_an_engine_that_connects_again_gets_its_memory_back(worker: Any) -> None:
    """The worker has not noticed that the older connection is of no use: only its engine knows."""
    address, _ = worker
    connect = partial(connecting(address), "worker1")
    older = connect()
    send = question(older, 64)
    assert answered(send(), 64)
    assert older.allocate(MEMORY - (1 << 14)) is not None
    newer = connect()
    assert (newer.memory, newer.others) == (MEMORY, 0)
    with pytest.raises(WorkerLost, match="it has ended"):
        send().wait()
    assert newer.allocate(MEMORY) is not None
    newer.close()
    older.close()


def test_a_job_goes_on_with_a_new_connection(families: Any, worker: Any) -> None:
    (address, said), known, broken = worker, families("llama"), list[int]()

    def end(progress: Any) -> None:
        if progress.sweeps == 3 and not broken:
            broken.append(3)
            engine.core.machine.tier("worker1").client.link.close()  # type: ignore[attr-defined]

    with Engine(known.directory, policy=Policy(4, 2, cache={"workers": 1}), device="cpu", attention_workers=[address],
                on_sweep=end) as engine:  # fmt: skip
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        assert len(engine.summary.replanned) == 1
    assert sum("serving" in line for line in said) == 2
