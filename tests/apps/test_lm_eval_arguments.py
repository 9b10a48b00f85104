"""Arguments of flexengine lm-eval: engine options and generation arguments, and those that are refused."""

from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")

from flexengine.apps.lm_eval.arguments import engine_device, engine_options, generation_of, joined, unused
from flexengine.errors import InvalidInput
from flexengine.lossy import BUNDLED, Lossy


@pytest.mark.parametrize(("given", "field", "value"), [
    ({}, "max_tokens", 256), ({"max_gen_toks": "7"}, "max_tokens", 7), ({"max_tokens": 7}, "max_tokens", 7),
    ({"until": "x"}, "stop", ("x",)), ({"until": ["x", "y"]}, "stop", ("x", "y")), ({}, "stop_token_ids", (1,)),
    ({"temperature": 0.7}, "temperature", 0.7), ({"temperature": 0.7, "do_sample": False}, "temperature", 0.0),
    ({"temperature": 0.7, "do_sample": True, "top_p": 0.5, "top_k": 4}, "top_p", 0.5),
    ({"num_beams": 1, "top_p": None}, "top_p", 1.0), ({"until": [str(i) for i in range(20)]}, "stop", tuple(
        str(i) for i in range(16))),
])  # fmt: skip
def test_sampling_parameters(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(generation_of(given, 1)[0], field) == value


@pytest.mark.parametrize(("given", "message"), [
    ({"num_beams": 4}, "gen_kwargs has num_beams 4, which is not supported; num_beams must be 1;"),
    ({"typical_p": 0.5}, "gen_kwargs has typical_p 0.5, which is not supported; it may have until, do_sample, max_gen"),
    ({"do_sample": True}, "do_sample true and no temperature; set a temperature above 0"),
    ({"until": ["x"] * 40 + [5]}, "until 5; it must be text"), ({"until": ["x"] * 20 + [""]}, "until ''; it must"),
    ({"max_gen_toks": 0}, "gen_kwargs has max_gen_toks 0; at least 1"),
    ({"temperature": "hot"}, "a value is no number"), ({"top_p": 2, "temperature": 1.0}, "top_p is 2"),
])  # fmt: skip
def test_refused_generation_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        generation_of(given, None)


def test_engine_options() -> None:
    given = {"pretrained": "m", "weights": "int4", "calibrate": True, "device_mem": "4G", "allow": None}
    made = {"model": "m", "lossy": Lossy("int4", calibrate=BUNDLED), "device_mem": "4G", "device": "cuda"}
    assert engine_options(given, "cuda:0") == made
    assert engine_options({"allow": "int8-weights", "overlap": False}, None) == {"allow": ["int8-weights"],
                                                                                 "overlap": False}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), [
    ({"dtyp": "auto"}, "model_args has 'dtyp', which is no option; the options are allow, allow_symlinks, "
     "attention_workers, batch_size"),
    ({"model": "a", "pretrained": "b"}, "model 'a' and pretrained 'b', which mean the same"),
    ({"lossy": Lossy("int4"), "cache": "int4"}, "lossy and cache are both given"),
    ({"weights": "int5"}, "int5"), ({"sparsify": 0}, "sparsify is 0; it must be a share above 0"),
    ({"policy": "none.json"}, "there is no policy file none.json"),
])  # fmt: skip
def test_refused_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        engine_options(given, None)


@pytest.mark.parametrize(("device", "message"), [("mps", "auto, cpu, cuda"), ("cuda:1", "CUDA_VISIBLE_DEVICES=N")])
def test_refused_devices(device: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"device is '{device}'; it must be one of .*{message}"):
        engine_device(device)


def test_arguments_beside_those_of_the_harness() -> None:
    """The harness adds its batch size and device, which --model_args may name, too."""
    added = {"batch_size": "auto", "max_batch_size": None, "device": "auto"}
    assert joined({"device": "cpu", "batch_size": 4}, added) == {"device": "cpu", "batch_size": 4}
    assert joined({"model": "m"}, added) == {"model": "m", "batch_size": "auto", "device": "auto"}
    with pytest.raises(InvalidInput, match="--device is 'sim', but model_args has device 'cpu'; leave one out"):
        joined({"device": "cpu"}, {"device": "sim"})


def test_batch_sizes_are_refused_aloud() -> None:
    assert unused(None, None) is unused("auto", None) is unused("auto:4", None) is None
    assert unused(8, 64) == "batch_size 8 and max_batch_size 64 not used: the plan chooses the sizes of batches"
