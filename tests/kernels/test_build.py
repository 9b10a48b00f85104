"""How the native kernels are built and kept, and which set of kernels is chosen where they cannot be."""

import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexengine import kernels
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput, ModelNotFound
from flexengine.kernels import build
from flexengine.system.openmp import openmp_runtime
from tests.helpers.listening import listening


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    kernels._load.cache_clear()
    yield
    kernels._load.cache_clear()


def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXENGINE_KERNELS", "reference")
    with listening() as heard:
        assert kernels.load().name == "reference"
    assert not heard
    kernels._load.cache_clear()
    monkeypatch.setenv("FLEXENGINE_KERNELS", "fast")
    with pytest.raises(InvalidInput, match="fast"):
        kernels.load()


def test_nothing_is_built_for_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiling takes half a minute, so a wrong model name must be reported before it."""
    monkeypatch.setattr(kernels, "load_native", lambda: pytest.fail("kernels were built"))
    monkeypatch.delenv("FLEXENGINE_KERNELS", raising=False)
    with pytest.raises(ModelNotFound, match="no model at"):
        Engine(str(tmp_path / "none"), device="cpu")
    monkeypatch.setenv("FLEXENGINE_KERNELS", "fast")
    with pytest.raises(InvalidInput, match="FLEXENGINE_KERNELS is 'fast'"):
        Engine(str(tmp_path / "none"), device="cpu")


@pytest.mark.slow
def test_the_openmp_library_is_that_of_torch() -> None:
    """Others may be loaded before or after it: scikit-learn has one of its own."""
    pytest.importorskip("sklearn")
    found = set[str]()
    for order in ("torch, sklearn.utils._openmp_helpers", "sklearn.utils._openmp_helpers, torch"):
        code = f"import {order}; from flexengine.system.openmp import openmp_runtime; print(openmp_runtime())"
        found.add(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    (path,) = found
    assert "scikit" not in path


@pytest.mark.parametrize(("free", "together"), [(1, [1, 1, 1]), (900_000_000, [2, 1]), (1 << 40, [3])])
def test_compilers_at_the_same_time_fit_in_memory(
    free: int, together: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a small container, six at once would take what the whole job may."""
    ran = list[int]()

    def run(*commands: list[str], ended: object = None) -> str:
        ran.append(len(commands))
        Path(commands[0][commands[0].index("-o") + 1]).touch()
        return ""

    monkeypatch.setattr(build, "usable_memory", lambda: free)
    monkeypatch.setattr(build, "_run", run)
    build._compile(["c++"], [], [tmp_path / f"{name}.cpp" for name in "abc"], None, tmp_path / "library.so")
    assert ran == [*together, 1]  # the last one links


def test_threads_that_call_first_at_once_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def build_slowly() -> object:
        calls.append(threading.current_thread())
        time.sleep(0.1)
        return object()

    monkeypatch.setattr(kernels, "load_native", build_slowly)
    monkeypatch.delenv("FLEXENGINE_KERNELS", raising=False)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: kernels.load(), range(4)))
    assert len(found) == len(calls) == 1


def test_without_a_compiler_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("FLEXENGINE_KERNELS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with listening() as heard, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kernels.load()
        assert kernels.load() is found
    assert heard.messages == [
        "attention and products with encoded weights run several times slower: no C++ compiler was found ($CXX, c++,"
        " g++, clang++); install g++"
    ]
    assert [record.level for record in heard] == [logging.WARNING]
    assert found.name == "reference"


def test_a_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("#error broken on purpose\n")
    monkeypatch.setattr(build, "SOURCES", [source])
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    monkeypatch.delenv("FLEXENGINE_KERNELS", raising=False)
    with listening() as heard:
        assert kernels.load().name == "reference"
    assert re.search("broken on purpose|no C\\+\\+ compiler", heard.messages[0])
    assert not list(tmp_path.glob("kernels/*"))


def test_a_compiler_that_does_not_know_this_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A message says so, also when the library is built again because a crash damaged it."""
    compiler, source = tmp_path / "cc", tmp_path / "some.cpp"
    real = shutil.which("c++") or pytest.skip("no C++ compiler")
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-march=native*) echo "error: unknown -march" >&2; exit 1;; esac\n'
                        f'exec {real} "$@"\n')  # fmt: skip
    compiler.chmod(0o755)
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with listening() as heard:
        assert build.load(sources=[source]).answer() == 42
    (said,) = heard.messages
    assert re.search("for any CPU, .* unknown -march", said)
    [library] = tmp_path.glob("cache/kernels/*.so")
    copy = tmp_path / "other" / "kernels" / library.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"damaged")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "other"))
    with listening() as heard:
        assert build.load(sources=[source]).answer() == 42
    assert heard.messages == [said]


def test_a_second_environment_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its compiler has another name, and its OpenMP library is a copy in another directory."""
    real, openmp = shutil.which("c++") or pytest.skip("no C++ compiler"), openmp_runtime()
    source = tmp_path / "some.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    assert build.load(sources=[source]).answer() == 42
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    (tmp_path / "x86_64-conda-linux-gnu-c++").symlink_to(real)
    monkeypatch.setenv("CXX", str(tmp_path / "x86_64-conda-linux-gnu-c++"))
    monkeypatch.setattr(build, "openmp_runtime", lambda: shutil.copy(openmp, tmp_path))
    assert build.load(sources=[source]).answer() == 42
    name = build._name(["c++"], [], [source])
    assert build._name(["c++", "-O0"], [], [source]) != name != build._name(["c++"], ["-O0"], [source])
    other = tmp_path / "other" / Path(openmp).name
    other.parent.mkdir()
    other.write_bytes(Path(openmp).read_bytes() + b" ")
    monkeypatch.setattr(build, "openmp_runtime", lambda: str(other))
    assert build._name(["c++"], [], [source]) != name


def test_these_sources_compile() -> None:
    """Where native kernels are missing, other tests are skipped or use the reference; this one tells why."""
    if not build._compilers():
        pytest.skip("there is no compiler")
    kernels.load_native()  # raises BuildFailed with the compiler's words


def test_the_headers_are_part_of_what_is_built(tmp_path: Path) -> None:
    source = tmp_path / "some.cpp"
    source.write_text("// nothing\n")
    assert all(path.read_text() in build._code([source]) for path in Path(build.__file__).parent.glob("*.h"))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file"))
    assert build._folder().is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False], ids=["one waits", "both build"])
def test_two_processes_may_build_at_once_and_share_one_openmp(tmp_path: Path, locks: bool) -> None:
    """The compiling process continues when the other one waits for the lock or compiles, too, so that both overlap."""
    real = shutil.which("c++") or pytest.skip("no C++ compiler here")
    source, compiler = tmp_path / "small.cpp", tmp_path / "cc"
    source.write_text(SMALL)
    apart = f"[ $(wc -l < {tmp_path}/compiled) -lt 2 ] && ! [ -e {tmp_path}/waits ]"
    meet = f"while {apart}; do sleep 0.05; done"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo >> {tmp_path}/compiled; {meet};; esac\n'
                        f'exec {real} "$@"\n')  # fmt: skip
    compiler.chmod(0o755)
    environment = {**os.environ, "FLEXENGINE_CACHE": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-c", (TOLD if locks else UNLOCKED) + RACER, str(source)]
    racers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        out, errors = racer.communicate(timeout=120)
        assert racer.returncode == 0, errors
        total, *runtimes = out.split()
        assert total == "499500"
        assert len(runtimes) == 1
    assert len(list(tmp_path.glob("kernels/*"))) == 1
    assert len((tmp_path / "compiled").read_text()) == (1 if locks else 2)


def test_who_waits_is_told_once_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SECONDS", 0.5)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with listening() as heard, build._alone(tmp_path / "library.so"):
        pass
    (said,) = heard.begun("waiting")
    assert str(tmp_path) in said
    os.close(folder)
    with listening() as heard, build._alone(tmp_path / "library.so"):
        pass
    assert not heard


TOLD = """
import fcntl, os, pathlib
real = fcntl.flock
def flock(*how):
    try:
        real(*how)
    except BlockingIOError:
        pathlib.Path(os.environ["FLEXENGINE_CACHE"], "waits").touch()
        raise
fcntl.flock = flock
"""
UNLOCKED = """
import fcntl
import logging
def flock(*_):
    raise OSError("not here")
fcntl.flock = flock
"""
SMALL = """
extern "C" long flex_total(long n) {
    long total = 0;
#pragma omp parallel for reduction(+ : total) num_threads(2)
    for (long i = 0; i < n; i++) total += i;
    return total;
}
"""
RACER = r"""
import pathlib, re, sys, torch
from flexengine.kernels import build
from tests.helpers.listening import listening
library = build.load(sources=[pathlib.Path(sys.argv[1])])
runtimes = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\S*", pathlib.Path("/proc/self/maps").read_text()))
print(library.flex_total(1000), *runtimes)
"""
