"""Native kernels: what they do without memory, and the structs that Python fills in for them."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexengine.kernels import build, cpu, structs

SOURCES = Path(build.__file__).parent
WITHOUT = """
import resource, torch
from flexengine.codec.cache import CacheFormat
from flexengine.errors import OutOfMemory
from flexengine.kernels import cpu
from flexengine.kernels.base import AttentionOptions
from flexengine.runtime.execute import shortage

torch.set_num_threads(2)
kernel, heads, tokens, page = cpu.load_native(), 64, 1 << 20, 1 << 12
form = CacheFormat(4, 1, page, 64)
pool = torch.zeros(1, form.page_bytes, dtype=torch.uint8)
tables, q = torch.zeros(1, tokens // page, dtype=torch.int32), torch.ones(1, heads, 64)


def attend(length, **options):
    lengths = torch.tensor([length], dtype=torch.int32)
    return kernel.decode_attention(q, pool, tables, lengths, AttentionOptions(1.0, **options), form)


def refused(**options):
    try:
        attend(tokens, **options)
    except OutOfMemory as error:
        found = shortage(error, gpu=False)
        assert found is not None
        assert (found.tier, found.needed) == ("device", error.needed)
        return error.needed
    return 0


before = attend(100)  # also starts the threads
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), resource.RLIM_INFINITY))
whole, some = refused(), refused(topk=0.5)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(attend(100), before)
print(whole, some)
"""


def test_decode_attention_without_memory_is_an_error_that_a_job_understands() -> None:
    """1,024 partial results of 64 heads in 64 dimensions, and with top-k a score of every token and head."""
    child = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    whole, some = map(int, child.stdout.split())
    assert whole > 1024 * 64 * (64 + 2) * 4
    assert some > 2 * 64 * (1 << 20) * 4


def test_nothing_native_ends_the_process() -> None:
    for path in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")):
        assert not re.search(r"\b(abort|exit|terminate)\s*\(", path.read_text()), path.name


def test_fields_of_structs_are_those_of_the_c_side_in_order() -> None:
    names = "x w bias residual out rows n k x_row w_row out_row w_dtype pairs across panels threads"
    assert [name for name, _ in structs.Linear._fields_] == names.split()
    assert [kind for _, kind in structs.Decode._fields_[-5:]] == [ctypes.c_float] * 2 + [ctypes.c_int32] * 3
    assert all(struct._fields_ for struct in structs.STRUCTS.values())


def test_a_struct_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*structs.STRUCTS["gate"]._fields_, ("more", ctypes.c_int64)]

    try:
        library = build.load()
    except build.BuildFailed as error:
        pytest.skip(f"cannot build: {error}")
    size = ctypes.sizeof(structs.STRUCTS["gate"])
    monkeypatch.setitem(structs.STRUCTS, "gate", Longer)
    with pytest.raises(RuntimeError, match=rf"flex_gate has {size} bytes in the native kernels but {size + 8} here"):
        cpu.NativeKernels(library)
