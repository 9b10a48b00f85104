"""The arguments of lm-evaluation-harness: those of its model as options of an engine, those of its generation as
sampling parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from flexengine import shipped
from flexengine.config import MAX_STOPS, SamplingParams
from flexengine.engine.options import EngineOptions
from flexengine.errors import InvalidInput, shown
from flexengine.lossy import BUNDLED, Lossy
from flexengine.plan.hardware import Hardware
from flexengine.policy import Policy

OWN = ("batch_size", "max_batch_size", "max_length", "enable_thinking", "think_end_token")  # of FlexLM itself
_LOSSY = tuple(f.name for f in fields(Lossy))
_OPTIONS = tuple(f.name for f in fields(EngineOptions))
_FROM_FILE: dict[str, Callable[[str], object]] = {
    "policy": lambda text: Policy.load(shipped.find_file("policies", text)),
    "hardware": lambda text: Hardware.load(shipped.find_file("hardware", text)),
}
MAX_GEN_TOKS = 256  # default of the `hf` model
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one meaning; the first wins
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed", "ignore_eos")  # fmt: skip
ALLOWED = ("until", "do_sample", *_LENGTHS, *_SAMPLING)
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}  # accepted with this value only


def joined(model_args: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model with those that the harness adds. Raise InvalidInput if the devices differ, and
    that of the harness is not "auto".

    Args:
        model_args: --model_args. They come first, as the harness also adds its defaults.
        more: batch_size, max_batch_size and device of the harness; None stands for none.
    """
    own, other = model_args.get("device"), more.get("device")
    if own is not None and other not in (None, "auto", own):
        raise InvalidInput(f"--device is {shown(other)}, but model_args has device {shown(own)}; leave one out")
    return {name: value for name, value in more.items() if value is not None} | dict(model_args)


def engine_options(
    given: Mapping[str, Any], device: str | None, place: str = "model_args", own: Sequence[str] = OWN
) -> dict[str, Any]:
    """Return the keyword arguments of an engine. Raise InvalidInput if a name is unknown, a value is wrong, or the
    switches are given twice.

    Args:
        given: options of EngineOptions and switches of Lossy by name. The harness has converted numbers, true, false
            and none. A policy and a hardware may be names of files; `allow` may be one name.
        place: what has the options, for messages.
        own: options that are not the engine's, for messages.
    """
    if unknown := [name for name in given if name not in (*_OPTIONS, *_LOSSY, "pretrained")]:
        known = ", ".join(sorted({*_OPTIONS, *_LOSSY, *own, "pretrained"}))
        raise InvalidInput(f"{place} has {shown(unknown[0])}, which is no option; the options are {known}")
    options = {name: value for name, value in given.items() if name in _OPTIONS and value is not None}
    if given.get("pretrained") is not None:
        if "model" in options:
            both = f"model {shown(options['model'])} and pretrained {shown(given['pretrained'])}"
            raise InvalidInput(f"{place} has {both}, which mean the same; leave one out")
        options["model"] = given["pretrained"]
    switches = {n: value for n, value in given.items() if n in _LOSSY and value is not None and value is not False}
    if switches and "lossy" in options:
        raise InvalidInput(f"lossy and {', '.join(switches)} are both given; leave one out")
    if switches:
        calibrate = {"calibrate": BUNDLED} if switches.get("calibrate") is True else {}
        options["lossy"] = Lossy(**switches | calibrate)
    for name, load in _FROM_FILE.items():
        if isinstance(options.get(name), str):
            options[name] = load(options[name])
    if isinstance(options.get("allow"), str):
        options["allow"] = [options["allow"]]
    return options | ({} if device is None else {"device": engine_device(device)})


def engine_device(device: str) -> str:
    """Return the engine's name of a device of torch. Raise InvalidInput if the engine cannot compute there."""
    if device in ("auto", "cpu", "cuda", "sim"):
        return device
    if device == "cuda:0":
        return "cuda"
    choice = "; CUDA_VISIBLE_DEVICES=N chooses the GPU" if str(device).startswith("cuda:") else ""
    raise InvalidInput(f"device is {shown(device)}; it must be one of auto, cpu, cuda, cuda:0, sim{choice}")


def unused(batch_size: int | str | None, max_batch_size: int | None) -> str | None:
    """Return a message about batch sizes that were given; None if there are none. "auto" needs no message."""
    given = [] if batch_size is None or str(batch_size).startswith("auto") else [f"batch_size {batch_size}"]
    given += [] if max_batch_size is None else [f"max_batch_size {max_batch_size}"]
    return f"{' and '.join(given)} not used: the plan chooses the sizes of batches" if given else None


def generation_of(given: Mapping[str, Any], end_token: int | None) -> tuple[SamplingParams, list[str]]:
    """Return how a request is generated: the sampling parameters, and all strings that end the text, of which they have
    the first ones. Raise InvalidInput if an argument is unknown, or a value is not allowed. end_token: a token that
    ends the text; None for the model's own end tokens alone."""
    from lm_eval.models.utils import normalize_gen_kwargs

    some = {name: value for name, value in given.items() if value is not None}
    for name, value in some.items():
        if name not in ALLOWED and _NEUTRAL.get(name) != value:
            only = f"; {name} must be {shown(_NEUTRAL[name])}" if name in _NEUTRAL else ""
            fault = f"gen_kwargs has {name} {shown(value)}, which is not supported{only}"
            raise InvalidInput(f"{fault}; it may have {', '.join(ALLOWED)}")
    try:
        normal: dict[str, Any] = dict(normalize_gen_kwargs(some, MAX_GEN_TOKS))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"gen_kwargs is {shown(dict(given))}; a value is no number ({error})") from error
    if normal["max_gen_toks"] < 1:
        raise InvalidInput(f"gen_kwargs has max_gen_toks {normal['max_gen_toks']}; at least 1 token must be generated")
    temperature = float(normal.get("temperature", 0.0))
    if normal["do_sample"] and temperature == 0:
        fault = "gen_kwargs has do_sample true and no temperature"
        raise InvalidInput(f"{fault}; set a temperature above 0, or do_sample false")
    until = list(normal["until"])
    if wrong := [text for text in until if not isinstance(text, str) or not text]:
        must = "it must be text of at least one character, or a list of such texts"
        raise InvalidInput(f"gen_kwargs has until {shown(wrong[0])}; {must}")
    sampling = {name: normal[name] for name in _SAMPLING if name in normal} | {"temperature": temperature}
    ends = () if end_token is None else (end_token,)
    params = SamplingParams(normal["max_gen_toks"], stop=tuple(until[:MAX_STOPS]), stop_token_ids=ends, **sampling)
    return params, until
