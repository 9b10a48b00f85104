"""Runs of a command line."""

import pytest

from flexengine.apps.evaluate.runs import Run, parse_run, runs_of
from flexengine.errors import InvalidInput
from flexengine.lossy import Lossy


def test_specifications() -> None:
    assert parse_run("exact") == Run("exact")
    assert parse_run("4bit:weights=int4,calibrate=bundled") == Run("4bit", None, Lossy("int4", calibrate="bundled"))
    assert parse_run("sparse:sparse-attention=0.1, dtype=float16") == Run(
        "sparse", None, Lossy(sparse_attention=0.1), "float16")  # fmt: skip
    both = Lossy(cache="int8", compute="int8")
    assert parse_run("cache=int8,compute=int8") == Run("cache=int8,compute=int8", None, both)
    assert parse_run("a:sparsify=0.7,flash=oracle") == Run("a", None, Lossy(sparsify=0.7, flash="oracle"))
    assert parse_run("big:model=org/m,sparse_attention=0.5") == Run("big", "org/m", Lossy(sparse_attention=0.5))


def test_each_specification_is_run_with_each_model() -> None:
    assert runs_of([], []) == [Run("exact")]
    assert runs_of(["a/m"], ["exact", "4:weights=int4"]) == [Run("exact", "a/m"), Run("4", "a/m", Lossy("int4"))]
    found = runs_of(["a/m", "n"], ["exact", "4:weights=int4", "own:model=k"])
    assert [(run.name, run.model) for run in found] == [
        ("m exact", "a/m"), ("n exact", "n"), ("m 4", "a/m"), ("n 4", "n"), ("own", "k")]  # fmt: skip
    assert [run.stem for run in found] == ["m_exact", "n_exact", "m_4", "n_4", "own"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["4bit"], "--run is '4bit'; it must be exact, or NAME:OPTION=VALUE,"),
        (["4bit:"], "--run is '4bit:'"),
        (["a:wights=int4"], "--run a: there is no option 'wights'; did you mean weights? Else choose from"),
        (["a:weights"], "--run a: weights has no value; write weights=VALUE once"),
        (["a:weights=int4,weights=int8"], "--run a: weights is given twice"),
        (["a:weights=int5"], "--run a: weights is 'int5'; it must be one of int8, int4, int3, int2"),
        (["a:sparse-attention=x"], "--run a: sparse-attention is 'x'; it must be a number"),
        (["a:sparsify=much"], "--run a: sparsify is 'much'; it must be a number"),
        (["a:sparse-attention=2"], "--run a: sparse_attention is 2.0; it must be a share"),
        (["a:calibrate=bundled"], "--run a: calibrate is 'bundled', but it is for weights that are fitted"),
        (["a b:weights=int4", "a_b:weights=int8"], "two runs are named a b and a_b"),
        (["n" * 201 + ":weights=int4"], "has 201 bytes; it must have at most 200, as files are named by it"),
        (["exact", "exact"], "two runs are named exact and exact"),
    ],
)
def test_refused(texts: list[str], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        runs_of([], texts)
    assert words in str(caught.value)


def test_models_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two runs are named m exact and m exact"):
        runs_of(["a/m", "b/m"], [])
