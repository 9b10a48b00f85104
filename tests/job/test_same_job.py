"""Manifests: a change of anything that affects results is reported by name; other changes are ignored."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexengine.config import SamplingParams
from flexengine.errors import InvalidInput
from flexengine.job.manifest import manifest_of
from flexengine.job.same_job import check_same, differences

GIVEN = {"path": Path("in.jsonl"), "sha256": "a" * 64, "prompt_column": None}
ENGINE = {"model": "m", "model_fingerprint": "f", "dtype": "float32", "threads": [1, 2]}
OTHER: dict[str, Any] = {
    "max_tokens": 7, "temperature": 0.5, "seed": 9, "ignore_eos": True, "top_k": 4, "top_p": 0.5, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "stop": ("x",),
    "stop_token_ids": (5,), "n": 2, "logprobs": 0, "min_tokens": 2, "logit_bias": {5: 1.0}, "bad_words": ("x", (5, 6)),
    "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False, "continue_final_message": True,
}  # fmt: skip


def manifest(given: dict[str, Any] = GIVEN, engine: dict[str, Any] = ENGINE, lossy: Any = None, **sampling: Any) -> Any:
    scan = SimpleNamespace(sha256=given["sha256"])
    rows: Any = SimpleNamespace(scan=lambda: scan, form="jsonl", settings={}, path=given["path"])
    rows.rules = SimpleNamespace(column=given["prompt_column"])
    return manifest_of(rows, SamplingParams(**sampling), engine, lossy or {})


def test_every_sampling_parameter_has_a_case() -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", OTHER)
def test_each_sampling_parameter_is_compared(name: str) -> None:
    was, now = (json.dumps(value) for value in (getattr(SamplingParams(), name), OTHER[name]))
    assert differences(manifest(), manifest(**{name: OTHER[name]})) == [f"{name}: was {was}, now {now}"]


def test_parameters_that_earlier_versions_lacked_are_stored_only_if_set() -> None:
    assert not {"min_tokens", "logit_bias", "bad_words", "chat_template_kwargs"} & manifest().keys()


def test_the_column_of_prompts_is_compared() -> None:
    found = differences(manifest(), manifest({**GIVEN, "prompt_column": "other"}))
    assert found == ['prompt_column: was null, now "other"']


def test_contents_of_the_input_are_compared() -> None:
    found = differences(manifest(), manifest({**GIVEN, "path": Path("new.jsonl"), "sha256": "b" * 64}))
    assert found == ["the input has other contents: was in.jsonl, SHA-256 aaaaaaaaaaaa..., now new.jsonl, SHA-256"
                     " bbbbbbbbbbbb..."]  # fmt: skip


@pytest.mark.parametrize("name", sorted(ENGINE.keys() - {"model"}))
def test_each_fact_of_the_engine_is_compared(name: str) -> None:
    (found,) = differences(manifest(), manifest(engine={**ENGINE, name: "other"}))
    assert found.endswith('now "other"')
    assert found.startswith(f"{name}: was ")


def test_lossy_switches_are_compared_one_by_one() -> None:
    was = manifest(lossy={"weights": "int8", "cache": "int4", "sparse_attention": 0.1})
    now = manifest(lossy={"weights": "int4", "cache": "int4", "allow": ["int4", "int8"]})
    assert differences(was, now) == [
        "weights: was int8, now int4", "allow: was not given, now int4,int8",
        "sparse_attention: was 0.1, now not given",
    ]  # fmt: skip
    assert differences(manifest(), was) != []


def test_names_of_the_input_and_the_model_are_not() -> None:
    assert differences(manifest(), manifest({**GIVEN, "path": Path("renamed.jsonl")})) == []
    assert differences(manifest(), manifest(engine={**ENGINE, "model": "renamed"})) == []


@pytest.mark.parametrize(("sha256", "mtime_ns"), [(None, 2), (None, 1), ("c" * 64, 2)])
def test_another_name_counts_where_files_were_written_anew_and_only_sampled(sha256: Any, mtime_ns: int) -> None:
    def model(name: str, time: int) -> Any:
        mark = {"bytes": 9, "mtime_ns": time, "sample": "s", "sha256": sha256}
        return manifest(engine={**ENGINE, "model": name, "model_files": {"a": mark}})

    refused = ['model: was "v1", now "v2"'] if (sha256, mtime_ns) == (None, 2) else []
    assert differences(model("v1", 1), model("v2", mtime_ns)) == refused
    assert differences(model("v1", 1), model("v1", mtime_ns)) == []


def test_a_value_of_another_type_or_missing_is_different() -> None:
    assert differences({"a": 1, "b": 0, "gone": 2}, {"a": True, "b": 0, "new": "x"}) == [
        "a: was 1, now true", 'new: was absent, now "x"', "gone: was 2, now absent"]  # fmt: skip


def test_it_is_what_json_gives_back() -> None:
    made = manifest(stop=("a", "b"), stop_token_ids=(1,))
    assert json.loads(json.dumps(made)) == made
    assert differences(json.loads(json.dumps(made)), made) == []


def test_the_message_lists_all_and_says_what_to_do() -> None:
    check_same(manifest(), manifest(), "j")
    with pytest.raises(InvalidInput) as caught:
        check_same(manifest(), manifest(seed=1, stop=("x" * 500,)), "out.jsonl.journal")
    message = str(caught.value)
    assert "out.jsonl.journal" in message
    assert "seed: was 0, now 1; stop: was []" in message
    assert "give --restart (restart=True in Python) to start over, or name another output" in message
    assert len(message) < 500
