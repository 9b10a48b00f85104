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
from flexengine.runtime.shortage import shortage

torch.set_num_threads(2)
kernel, heads, tokens, page = cpu.load_native(), 64, 1 << 20, 1 << 12
form = CacheFormat(4, 1, page, 64)
pool = torch.zeros(1, form.page_bytes, dtype=torch.uint8)
tables, q = torch.zeros(1, tokens // page, dtype=torch.int32), torch.ones(1, heads, 64)


def attend(length, **options):
    lengths = torch.tensor([length], dtype=torch.int32)
    return kernel.decode_attention(q, pool, tables, lengths, 1.0, form=form, **options)


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


def declared(struct: str) -> list[tuple[str, int]]:
    """Names and sizes of the fields of a struct, read from the C++ text."""
    text = "\n".join(path.read_text() for path in SOURCES.glob("*.h"))
    [body] = re.findall(rf"\nstruct {struct} \{{\n(.*?)\n(?:}};|\n)", text, re.S)
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4, "double": 8}
    fields = []
    for kind, names in re.findall(r"(?:const )?(\w+)\b((?:[\s*]+\w+,?)+);", re.sub(r"//.*", "", body)):
        fields += [(name.strip(" *"), 8 if "*" in names else sizes[kind]) for name in names.split(",")]
    return fields


@pytest.mark.parametrize("struct", structs.STRUCTS.values(), ids=structs.STRUCTS)
def test_structs_have_the_fields_of_the_c_side_in_order(struct: type[ctypes.Structure]) -> None:
    here = [(field[0], ctypes.sizeof(field[1])) for field in struct._fields_]
    assert here == declared(struct.__name__.removesuffix("Args"))


def test_a_struct_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(ctypes.Structure):
        _fields_ = [*structs.STRUCTS["gate"]._fields_, ("more", ctypes.c_int64)]

    try:
        library = build.load()
    except build.BuildFailed as error:
        pytest.skip(f"cannot build: {error}")
    monkeypatch.setitem(structs.STRUCTS, "gate", Longer)
    with pytest.raises(RuntimeError, match=r"flex_gate has 32 bytes in the native kernels but 40 in .*Longer"):
        cpu.NativeKernels(library)
