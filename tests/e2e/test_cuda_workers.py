"""On a GPU: attention workers that hold their pages there. Else skips visibly; tests/guests/attention_workers/
test_devices.py runs the same code on a device that is simulated."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, SamplingParams
from flexengine.guests.attention_workers.devices import CudaDevice, open_device
from flexengine.shell.commands.main import main
from tests.helpers.attention_workers import listening
from tests.helpers.families import NEW
from tests.helpers.forked import Forked
from tests.helpers.ports import free_port

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
MEMORY = 1 << 24
POLICIES: list[tuple[int, dict[str, Any]]] = [
    (1, dict(gpu_batch_size=3, num_gpu_batches=3, cache={"workers": 0.6, "device": 0.4}, prefill_tokens=16)),
    (2, dict(gpu_batch_size=3, num_gpu_batches=2, cache={"workers": 1}, partition="heads", queries_first=True)),
    (3, dict(gpu_batch_size=4, num_gpu_batches=2, cache={"workers": 1}, partition="tokens", prefill_tokens=7)),
]  # fmt: skip


def generated(known: Any, policy: dict[str, Any], workers: Any, **options: Any) -> list[list[int]]:
    options = dict(device_mem="2G", host_mem="2G") | options if options.get("device") == "cuda" else options
    with Engine(
        known.directory, policy=Policy(**policy), attention_workers=workers, dtype="float32", **options
    ) as engine:
        results = engine.generate(known.rows, GREEDY)
        assert engine.summary.peak_bytes["worker1"] > 0
        assert engine.planner.rates.known().worker_attention["worker1"] > 0
    return [r.token_ids for r in results]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "opt"])
@pytest.mark.parametrize("split", range(len(POLICIES)))
def test_tokens_are_those_of_transformers(families: Any, family: str, split: int, device: str) -> None:
    """The workers are threads of this process, on the engine's GPU."""
    known, (count, policy) = families(family), POLICIES[split]
    with ExitStack() as stack:
        pools = [listening(MEMORY, device=open_device("cuda", MEMORY)) for _ in range(count)]
        addresses = [stack.enter_context(pool)[0] for pool in pools]
        assert generated(known, policy, addresses, device=device) == known.expected


@pytest.mark.parametrize("form", [Lossy(cache="int4"), Lossy(sparse_attention=0.3)], ids=str)
def test_lossy_caches_are_those_of_the_device(families: Any, form: Lossy) -> None:
    known, policy = families("llama"), dict(gpu_batch_size=3, num_gpu_batches=3)
    options: dict[str, Any] = dict(device="cuda", device_mem="2G", host_mem="2G", lossy=form, dtype="float32")
    with Engine(known.directory, policy=Policy(**policy), **options) as engine:
        expected = [r.token_ids for r in engine.generate(known.rows, GREEDY)]
    with listening(MEMORY, device=open_device("cuda", MEMORY)) as (address, _):
        found = generated(known, {**policy, "cache": {"workers": 1}}, [address], device="cuda", lossy=form)
    assert found == expected


def test_the_command_and_processes_of_the_engine(families: Any, tmp_path: Path) -> None:
    known, address = families("llama"), f"127.0.0.1:{free_port()}"
    serve = "import sys; from flexengine.shell.commands.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["serve-attention", address, "--device", "cuda:0", "--worker-mem", "64M"]
    worker = Forked(serve, words, tmp_path, log := tmp_path / "log")
    try:
        while "listening at" not in (log.read_text() if log.exists() else ""):
            assert worker.poll() is None, worker.said()
            time.sleep(0.05)
        assert f"for KV cache on cuda:0 {torch.cuda.get_device_name(0)}" in worker.said()
        policy = POLICIES[0][1]
        assert generated(known, policy, [address], device="cuda") == known.expected
        assert generated(known, policy, ["cuda:0"], device="cuda", worker_mem="64M") == known.expected
    finally:
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(60) == 143


def test_the_gpu_is_measured() -> None:
    """Bytes per second of attention: no slower than RAM, no faster than the memory of any GPU."""
    device = open_device("cuda", 1 << 30)
    assert isinstance(device, CudaDevice)
    assert 1e11 < device.rate < 2e13


def test_more_memory_than_is_free_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    total = torch.cuda.mem_get_info()[1]
    words = ["serve-attention", "127.0.0.1:29600", "--device", "cuda", "--worker-mem", str(total)]
    assert main(words) == 2
    assert "are free, and the worker needs 269 MB beside it; give at most" in capsys.readouterr().err
    assert main([*words[:3], f"cuda:{torch.cuda.device_count()}", *words[4:]]) == 2
    assert "but torch sees" in capsys.readouterr().err
