"""Attention workers whose pages are in the memory of a device. Here the device refuses what a GPU refuses
(tests/helpers/other_device.py), or is `sim`; tests/e2e/test_cuda_workers.py has a GPU."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Policy, SamplingParams, __version__
from flexengine.config import started_workers
from flexengine.errors import InvalidInput, WorkerLost
from flexengine.guests.attention_workers import devices
from flexengine.guests.attention_workers.attender import measure_workers
from flexengine.guests.attention_workers.client import Client
from flexengine.guests.attention_workers.devices import CudaDevice, PageDevice, StagedDevice, identity, open_device
from flexengine.guests.attention_workers.messages import MessageKind, WorkerQuestion
from flexengine.guests.attention_workers.pool import WorkerPool
from flexengine.guests.attention_workers.server import AttentionServer
from flexengine.guests.attention_workers.workers import WorkerTier
from flexengine.guests.wire.link import Broken, Connection
from flexengine.kernels.cuda import CudaKernels
from flexengine.lossy import Lossy
from flexengine.shell.commands.main import main
from flexengine.tier.machine import Links, make_machine
from tests.helpers.attention_workers import NetWorker, ThreadWorker
from tests.helpers.families import NEW
from tests.helpers.forked import Forked
from tests.helpers.other_device import OtherDevice, on_device
from tests.helpers.plans import opt
from tests.helpers.ports import free_port

GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
ALL = {"workers": 1}
OPENED = "flexengine.guests.attention_workers.workers"
POLICIES: list[tuple[int, dict[str, Any]]] = [
    (2, dict(gpu_batch_size=3, num_gpu_batches=3, cache={"workers": 0.6, "device": 0.4}, prefill_tokens=16)),
    (2, dict(gpu_batch_size=3, num_gpu_batches=2, cache=ALL, partition="heads", queries_first=True)),
    (3, dict(gpu_batch_size=4, num_gpu_batches=2, cache=ALL, partition="tokens", prefill_tokens=7)),
    (3, dict(gpu_batch_size=8, num_gpu_batches=1, cache=ALL, partition="tokens", queries_first=True)),
]  # fmt: skip


def device_worker(kind: type[ThreadWorker], made: list[WorkerPool], **fields: Any) -> Any:
    """Return a class of workers in threads, over shared memory or TCP, with pages on a device of their own."""

    class DeviceWorker(kind):  # type: ignore[misc, valid-type]
        def __init__(self, place: str, memory: int, threads: int, path: Any = None, device: str = "cpu") -> None:
            own, other = self.sockets()
            made.append(WorkerPool(memory, device=OtherDevice(**fields)))
            self.thread = threading.Thread(target=serve, args=(other, made[-1]), daemon=True)
            self.thread.start()
            Client.__init__(self, Connection(own), place, shares=self.in_memory, threads=threads)

    return DeviceWorker


def serve(connection: socket.socket, pool: WorkerPool) -> None:
    with suppress(Broken):  # the test ended the connection
        AttentionServer(Connection(connection), pool).run()


def generated(known: Any, workers: int, fields: dict[str, Any], **options: Any) -> list[list[int]]:
    with Engine(
        known.directory, policy=Policy(**fields), attention_workers=workers, worker_mem="4M", **options
    ) as engine:
        results = engine.generate(known.rows, GREEDY)
        assert [r.error for r in results] == [None] * len(results)
        assert engine.summary.bytes["worker1_send"] > 0
        assert engine.summary.peak_bytes["worker1"] > 0
    return [r.token_ids for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ThreadWorker, NetWorker])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("split", range(len(POLICIES)))
def test_tokens_are_those_of_transformers(
    families: Any, monkeypatch: pytest.MonkeyPatch, family: str, split: int, kind: Any
) -> None:
    """Grouped heads, windows with a soft cap, windows with sinks. Over shared memory, neither pages nor questions cross
    the connection."""
    pools = list[WorkerPool]()
    monkeypatch.setattr(devices, "STAGED", 1000)
    monkeypatch.setattr(f"{OPENED}.LocalWorker", device_worker(kind, pools))
    known, (workers, fields) = families(family), POLICIES[split]
    assert generated(known, workers, fields, device="cpu" if split == 1 else "sim") == known.expected
    assert len(pools) == workers
    for pool in pools:
        assert pool.taken == 0
        assert pool.device.freed > 0  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("form", [Lossy(cache="int4"), Lossy(cache="bf16"), Lossy(sparse_attention=0.3)], ids=str)
def test_lossy_caches(families: Any, monkeypatch: pytest.MonkeyPatch, form: Lossy) -> None:
    """A GPU's kernels in torch give what the processor's give at these lengths."""
    known, fields = families("llama"), POLICIES[0][1]
    monkeypatch.setattr(f"{OPENED}.LocalWorker", ThreadWorker)
    expected = generated(known, 1, fields, lossy=form, device="sim")
    monkeypatch.setattr(f"{OPENED}.LocalWorker", device_worker(NetWorker, []))
    assert generated(known, 1, fields, lossy=form, device="sim") == expected


@pytest.fixture
def worker() -> Any:
    made = device_worker(NetWorker, pools := [])("worker1", 1 << 20, 1)
    yield made
    made.close()
    assert pools[0].taken == 0


def test_pages_move_in_pieces(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer in RAM is as large as what is moved: a GPU may have more memory than the machine has RAM."""
    sizes, staging = list[int](), OtherDevice.staging

    def noted(device: OtherDevice, nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return staging(device, nbytes)

    monkeypatch.setattr(devices, "STAGED", 1 << 12)
    monkeypatch.setattr(OtherDevice, "staging", noted)
    data = torch.arange(1 << 16, dtype=torch.int32).view(torch.uint8)
    handle = worker.allocate(1 << 19)
    worker.write(handle, 64, data)
    back = torch.zeros(len(data) + 128, dtype=torch.uint8)
    worker.read(handle, 0, back).wait()
    assert back[64:-64].equal(data)
    assert not torch.cat([back[:64], back[-64:]]).any()  # new memory is zeros
    assert max(sizes) == 1 << 12
    assert sum(sizes) == len(data) + len(back)


def test_the_worker_tells_its_device(worker: Any) -> None:
    assert (worker.pages, worker.rate) == ("device", 0)
    assert worker.name.endswith(f"process {os.getpid()}, other device)")


def test_memory_of_the_device_is_the_limit(worker: Any) -> None:
    assert worker.allocate(1 << 20) is not None
    assert worker.allocate(64) is None


def test_pages_are_not_shared_memory() -> None:
    """A worker with a device refuses pages in shared memory, and questions about memory that holds none."""
    local = device_worker(ThreadWorker, [])("worker1", 1 << 16, 1)
    handle = local.allocate(1 << 12, counted=False)
    question = WorkerQuestion(
        handle=handle, start=0, pages=4, page_tokens=16, heads=2, kv_heads=1, head_dim=8, bits=0, pool_dtype=0, dtype=0,
        batch=0, group=0, scale=1.0,
    )  # fmt: skip
    local.link.send(MessageKind.TABLES, (0, 0, 2, 1, 0), torch.tensor([0, 1, 20, 20, 1, 3, 0], dtype=torch.int32))
    vectors = torch.zeros(32).view(torch.uint8)
    with pytest.raises(WorkerLost, match=rf"could not answer \(ValueError: memory {handle} holds no pages\)"):
        local.ask(0, question, vectors, vectors[:64].clone()).wait()
    local.close()
    other = device_worker(ThreadWorker, [])("worker1", 1 << 16, 1)
    other.pages = "ram"  # as if the engine did not know
    with pytest.raises(WorkerLost):
        other.allocate(64)
    other.close()


def test_an_engine_of_any_kernels_is_served_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same version only. A processor's kernels must be the engine's."""
    kernels = "flexengine.guests.attention_workers.client.identity"
    other = device_worker(NetWorker, [])
    monkeypatch.setattr(kernels, lambda: f"flexengine {__version__} with OtherKernels")
    with pytest.raises(InvalidInput, match=f"refuses: it runs {identity()}, protocol"):
        other("worker1", 1 << 16, 1)
    monkeypatch.setattr(OtherDevice, "identity", CudaDevice.identity)
    other("worker1", 1 << 16, 1).close()
    monkeypatch.setattr(kernels, lambda: f"flexengine {__version__}9 with OtherKernels")
    with pytest.raises(InvalidInput, match=f"refuses: it runs flexengine {__version__}, protocol"):
        other("worker1", 1 << 16, 1)


def test_the_plan_counts_with_the_rate_that_the_worker_has_measured(tmp_path: Path) -> None:
    """Per token, as much in any format of the cache."""
    model = opt(2, 64, 4)
    made = device_worker(NetWorker, pools := [])

    def connected(place: str) -> Client:
        client = made(place, 1 << 22, 1)
        client.rate = 3 << 40
        return client  # type: ignore[no-any-return]

    machine = make_machine("sim", 1 << 28, 1 << 28, [tmp_path], Links(), workers=[WorkerTier(connected, "worker1", 2)])
    try:
        rates = measure_workers(machine, model, torch.float32)
    finally:
        machine.close()
    plain = 2 * model.kv_heads * model.head_dim * 4
    assert rates["worker_attention"] == {"worker1": pytest.approx((3 << 40) * model.kv_token / plain / 2)}
    assert rates["worker_seconds"] > 0
    assert len(pools) == 1


def test_a_device_measures_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all pages but those of one token each, by the seconds of all but those of one token each. The kernels
    advance the clock by a second per MB, and by a second for the launch."""
    clock, read = [0.0], list[int]()

    class Clocked(CudaKernels):
        def decode_attention(self, q: Any, pool: Any, tables: Any, lengths: Any, *rest: Any) -> torch.Tensor:  # type: ignore[override]
            found = super().decode_attention(q, pool, tables, lengths, *rest)
            read.append(int(lengths.sum()) * 2 * pool.shape[2] * pool.shape[4] * pool.itemsize)
            clock[0] += 1 + read[-1] / 1e6
            return found

    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    device = OtherDevice(Clocked(fused=False))
    on_device(lambda: device.measure(2 << 20))
    assert device.rate == pytest.approx(1e6, rel=1e-6)
    assert max(read) == 1 << 20
    assert device.freed == 1


def test_names_and_sizes_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_device("cpu", 1 << 20)) is PageDevice
    sim = open_device("sim", 1 << 22)
    assert type(sim) is StagedDevice
    assert sim.rate > 0
    for name in ("gpu", "cuda:", "cuda:x", "cuda:-1", "sim:1", ""):
        with pytest.raises(InvalidInput, match=r"--device is .*; it must be cpu, cuda, cuda:0"):
            open_device(name, 1)
    with pytest.raises(InvalidInput, match=r"--worker-mem is 100,000 TB, but [\d.]+ [kMG]B of RAM are free; give less"):
        open_device("sim", 10**17)
    with pytest.raises(InvalidInput, match=r"--worker-mem is 1.05 MB, but"):  # what it needs beside is not named
        open_device("sim", 1 << 20, 10**17)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpus_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-attention", "127.0.0.1:29600", "--worker-mem", "4M"]
    assert main([*words, "--device", "cuda:1"]) == 2
    assert "--device is cuda:1, but torch sees no CUDA GPU; leave --device out" in capsys.readouterr().err
    assert main([*words, "--device", "sim", "--worker-file", "."]) == 2
    assert "--worker-file holds pages for the processor, but --device is sim; remove one" in capsys.readouterr().err


def test_memory_of_a_gpu_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what is free now, less what kernels need."""
    from flexengine.tier import cuda

    gpu = object.__new__(CudaDevice)
    gpu._cuda, gpu.name = cuda, "cuda:1 Tesla T4"
    monkeypatch.setattr(cuda, "memory", lambda: (3 << 30, 15 << 30))
    gpu.check((3 << 30) - devices.SCRATCH)
    text = r"--worker-mem is 3.23 GB, but of 16.1 GB of cuda:1 Tesla T4, 3.22 GB are free, .* at most 2.95 GB, or"
    with pytest.raises(InvalidInput, match=text):
        gpu.check(3 << 30)
    gpu.check((2 << 30) - devices.SCRATCH, beside=1 << 30)
    text = r"--worker-mem is 3.00 GB, .* 3.22 GB are free, and the worker needs 1.35 GB beside it; .* most 1.87 GB,"
    with pytest.raises(InvalidInput, match=text):
        gpu.check(3 * 10**9, beside=1 << 30)
    gpu.check(1_870_000_000, beside=1 << 30)


def test_a_number_beyond_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexengine.tier import cuda

    monkeypatch.setattr(cuda, "visible_gpus", lambda: 2)
    with pytest.raises(InvalidInput, match="--device is cuda:2, but torch sees 2 CUDA GPUs; give cuda:0 to cuda:1"):
        open_device("cuda:2", 1)


def test_a_worker_sees_all_gpus_although_its_engine_has_taken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the stages of a pipeline do. GPUs are named as the user's environment names them."""
    from flexengine.tier import cuda

    monkeypatch.setattr(cuda, "visible_gpus", lambda: 3)
    monkeypatch.setattr(cuda, "_gpus", 1)
    for given, own, everything in ((None, "2", "0,1,2"), ("7,5,4", "4", "7,5,4")):
        monkeypatch.setattr(cuda, "_hidden", {})
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given or "")
        assert devices.environment_of("cuda:1", 5) == {"OMP_NUM_THREADS": "5"}
        cuda.take_one(2)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
        assert devices.environment_of("cuda:1", 5)["CUDA_VISIBLE_DEVICES"] == everything
        assert devices.environment_of("sim", 5) == {"OMP_NUM_THREADS": "5"}


SERVE = "import sys; from flexengine.shell.commands.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_command_serves_a_simulated_device(families: Any, tmp_path: Path) -> None:
    known, address = families("llama"), f"127.0.0.1:{free_port()}"
    words = ["serve-attention", address, "--device", "sim", "--worker-mem", "8M"]
    worker = Forked(SERVE, words, tmp_path, log := tmp_path / "log")
    try:
        while "listening at" not in (log.read_text() if log.exists() else ""):
            assert worker.poll() is None, worker.said()
            time.sleep(0.05)
        assert "for KV cache on sim" in worker.said()
        with Engine(known.directory, policy=Policy(4, 2, cache=ALL), attention_workers=[address]) as engine:
            assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
            client = engine.core.machine.workers[0].client  # type: ignore[attr-defined]
            assert client.pages == "device"
            assert client.rate > 0
            known_rates = engine.planner.rates.known()
            assert known_rates.worker_attention["worker1"] == pytest.approx(client.rate, rel=1e-6)
    finally:
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == 143


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["requests", "tokens"])
def test_triton(families: Any, monkeypatch: pytest.MonkeyPatch, partition: str) -> None:
    """The kernels of a GPU, interpreted in a process of their own, which must be told before they are defined."""
    pytest.importorskip("triton", reason="needs triton")
    if not INTERPRETED:
        here = f"{__file__}::test_triton[{partition}]"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-W", "error:kernels run in plain torch", here]
        out = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
        if "only 0-dimensional arrays can be converted" in out.stdout:
            pytest.skip("this Triton's interpreter cannot count with this numpy")
        assert "1 passed" in out.stdout, out.stdout[-4000:] + out.stderr[-2000:]
        return
    called, known = list[str](), families("gpt-oss")
    attend = CudaKernels.decode_attention

    def noted(kernels: CudaKernels, q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        called.append(q.device.type)
        return attend(kernels, q, *rest, **more)

    monkeypatch.setattr(CudaKernels, "decode_attention", noted)
    monkeypatch.setattr(OtherDevice, "where", torch.device("cpu"))
    workers = 3 if partition == "tokens" else 1
    monkeypatch.setattr(f"{OPENED}.LocalWorker", device_worker(NetWorker, [], kernels=CudaKernels()))
    assert CudaKernels()._triton("cpu") is not None
    policy = dict(gpu_batch_size=3, num_gpu_batches=3, cache=ALL, partition=partition)
    assert generated(known, workers, policy, device="sim") == known.expected
    assert set(called) == {"cpu"}


@pytest.mark.slow
def test_a_process_for_each_device(families: Any) -> None:
    """Their questions are in memory that both processes map; pages pass through 16 MiB of it."""
    known = families("llama")
    with Engine(
        known.directory, policy=Policy(3, 3, cache=ALL), device="sim", attention_workers=["sim", "sim"], worker_mem="8M"
    ) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected
        for tier in engine.core.machine.workers:
            client = tier.client  # type: ignore[attr-defined]
            assert (client.pages, client.shares, tier.local_bytes) == ("device", True, 16 << 20)
            assert client.name.endswith(", sim)")
            assert engine.summary.peak_bytes[tier.name] > 0
        assert engine.planner.rates.known().worker_cores == {}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_process_without_its_device_says_so(families: Any) -> None:
    with pytest.raises(WorkerLost, match="device is cuda:1, but torch sees no CUDA GPU"):
        Engine(families("llama").directory, attention_workers=["cuda:1"], worker_mem="8M")


def test_names_of_workers_that_are_started(families: Any) -> None:
    assert started_workers(2) == ("cpu", "cpu")
    assert started_workers(["sim", "cuda:1", "cuda"]) == ("sim", "cuda:1", "cuda")
    for addresses in (["10.0.0.2:29600"], ["cuda:29600"], ["sim:1"], []):
        assert started_workers(addresses) is None
    for given, options, text in (
        (["cuda:1"], {}, "attention_workers needs worker_mem"),
        (["sim", "10.0.0.2:29600"], {}, "is 'sim,10.0.0.2:29600', devices and addresses; start workers with"),
        (["gpu"], {}, "'gpu' is no address of an attention worker; give HOST:PORT"),
    ):
        with pytest.raises(InvalidInput, match=text):
            Engine(families("llama").directory, attention_workers=given, **options)
