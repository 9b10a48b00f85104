"""No task of a GPU's lane waits for the host, except for sampling tokens.

On a CPU: the device's tasks run with the kernels for a GPU, in plain torch, under a watch that fails on every function
whose result a GPU would have to hand over first. On a GPU torch itself watches.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexengine import Engine, Policy, SamplingParams, kernels
from flexengine.kernels import reference
from flexengine.kernels.cuda import CudaKernels
from flexengine.lossy import Lossy
from flexengine.model import experts
from flexengine.model.build import build
from flexengine.schedule.tasks import Op, Task
from flexengine.worker import open_model, weights
from flexengine.worker.worker import Worker
from tests.helpers.families import FAMILIES, NEW

GREEDY = SamplingParams(NEW, ignore_eos=True)
PACKAGE = str(Path(kernels.__file__).parents[1])
WAITING = {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "equal",
           "unique_consecutive", "unique_dim_consecutive", "bincount", "is_nonzero"}  # fmt: skip
BRINGING = ("tolist", "cpu", "numpy", "item")  # methods that a CPU's tensors answer by themselves


class Waits(AssertionError):
    pass


class Watch(TorchDispatchMode):
    """Raises Waits on functions whose result, or its size, depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        counted = name == "repeat_interleave" and func._overloadname == "Tensor"
        masked = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITING or counted or masked:
            raise Waits(f"{name} waits for the GPU")
        return func(*args, **(kwargs or {}))


def watched(patch: pytest.MonkeyPatch) -> None:
    """Watches every task of the lane "device"; not while tokens are drawn."""
    on = [False]

    def refuse(name: str, real: Callable[..., Any], ours: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if on[0] and (not ours or sys._getframe(1).f_code.co_filename.startswith(PACKAGE)):
                raise Waits(f"{name} waits for the GPU")
            return real(*args, **kwargs)

        return call

    for name in BRINGING:
        patch.setattr(torch.Tensor, name, refuse(name, getattr(torch.Tensor, name), False))
    patch.setattr(torch, "tensor", refuse("torch.tensor", torch.tensor, True))

    @contextmanager
    def watching(now: bool) -> Iterator[None]:
        before, on[0] = on[0], now
        try:
            yield
        finally:
            on[0] = before

    around(patch, lambda: Watch(), watching)


def around(
    patch: pytest.MonkeyPatch, watch: Callable[[], AbstractContextManager[Any]],
    watching: Callable[[bool], AbstractContextManager[Any]],
) -> None:  # fmt: skip
    perform, draw = Worker.perform, Worker._sample

    def performed(worker: Worker, task: Task) -> None:
        device = task.lane == "device" and task.op is not Op.LOAD_RESIDENT
        with watching(device), watch() if device else nullcontext():
            perform(worker, task)

    def drawn(worker: Worker, *args: Any) -> None:
        with watching(False), torch.utils._python_dispatch._disable_current_modes():
            draw(worker, *args)

    patch.setattr(Worker, "perform", performed)
    patch.setattr(Worker, "_sample", drawn)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernels on the CPU, without Triton, and its experts where they are plain."""
    plain = CudaKernels(fused=False)
    monkeypatch.setattr(kernels, "load_for", lambda device: plain)
    monkeypatch.setattr(experts, "has_grouped_product", lambda x: True)
    monkeypatch.setattr(weights, "pack_resident", lambda param, weight: None)  # a GPU's weights keep their order
    # Skeletons are not shared with other tests: under the watch, trials of native layers fail.
    monkeypatch.setattr(open_model, "build", build)
    monkeypatch.setattr(reference, "check_pages", lambda pages, room: None)  # on a GPU tables are trusted
    watched(monkeypatch)


MIX = (0.4, 0.3, 0.3)
POLICIES = {
    "resident": Policy(gpu_batch_size=8, num_gpu_batches=1),
    "everywhere": Policy(4, 2, weights=MIX, cache=MIX, activations=MIX, prefill_tokens=19),  # prompts in pieces
}
CASES = [("resident", "llama"), *(("everywhere", family) for family in FAMILIES)]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "family"), CASES)
def test_no_task_of_the_device_waits(
    families: Any, pretended: None, tmp_path: Path, family: str, policy: str
) -> None:  # fmt: skip
    known = families(family)
    options = dict(device="sim", overlap=False, offload_dir=tmp_path)
    with Engine(known.directory, policy=POLICIES[policy], **options) as engine:
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == known.expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "everywhere"])
@pytest.mark.parametrize("family", ["llama-tied"])
@pytest.mark.parametrize("lossy", [
    Lossy(weights="int4", cache="int4"), Lossy(weights="int8", compute="int8"),
    Lossy(cache="int8", sparse_attention=0.5),
], ids=str)  # fmt: skip
def test_nor_does_it_for_fewer_bits(
    families: Any, pretended: None, tmp_path: Path, lossy: Lossy, family: str, policy: str
) -> None:  # fmt: skip
    if lossy.sparse_attention is not None and policy == "everywhere":
        pytest.skip("which values are chosen is known on the device alone: bringing them waits, see worker.on_demand")
    known = families(family)
    options = dict(device="sim", overlap=False, offload_dir=tmp_path, lossy=lossy)
    with Engine(known.directory, policy=POLICIES[policy], **options) as engine:
        assert [r.error for r in engine.generate(known.rows, GREEDY)] == [None] * len(known.rows)


@pytest.mark.parametrize("wait", [
    lambda x: x.tolist(), lambda x: x.item(), lambda x: x.cpu(), lambda x: bool(x > 1), lambda x: int(x),
    lambda x: x.view(1)[x.view(1) > 1], lambda x: x.view(1).nonzero(), lambda x: x.view(1).unique(),
])  # fmt: skip
def test_the_watch_sees_what_waits(
    families: Any, pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wait: Callable[[Any], Any]
) -> None:  # fmt: skip
    known, append = families("llama"), CudaKernels.append

    def waiting(*args: Any) -> None:
        wait(torch.ones(()))
        append(*args)

    monkeypatch.setattr(CudaKernels, "append", waiting)
    options = dict(device="sim", overlap=False, offload_dir=tmp_path)
    with Engine(known.directory, policy=POLICIES["resident"], **options) as engine, pytest.raises(Waits):
        engine.generate(known.rows[:1], GREEDY)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("policy", "family"), CASES)
def test_torch_sees_no_wait_either(
    families: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, policy: str
) -> None:  # fmt: skip
    @contextmanager
    def watching(now: bool) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error" if now else "default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    known = families(family)
    options = dict(device="cuda", device_mem="2G", host_mem="2G", overlap=False, offload_dir=tmp_path)
    with Engine(known.directory, policy=POLICIES[policy], dtype="bfloat16", **options) as engine:
        expected = [r.token_ids for r in engine.generate(known.rows, GREEDY)]  # kernels are compiled
        around(monkeypatch, nullcontext, watching)
        assert [r.token_ids for r in engine.generate(known.rows, GREEDY)] == expected
