"""Generation arguments of lm-evaluation-harness as sampling parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from flexengine.config import MAX_STOPS, SamplingParams
from flexengine.errors import InvalidInput, shown

MAX_GEN_TOKS = 256  # default of the `hf` model
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one meaning; the first wins
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed", "ignore_eos")  # fmt: skip
ALLOWED = ("until", "do_sample", *_LENGTHS, *_SAMPLING)
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}  # accepted with this value only


class GenerationWay(NamedTuple):
    """How a request is generated."""

    params: SamplingParams
    # Strings that end the text. `params.stop` has the first of them.
    until: list[str]


def generation_of(given: Mapping[str, Any], end_token: int | None) -> GenerationWay:
    """Return how a request is generated. end_token: a token that ends the text; None for the model's own end tokens
    alone.

    Raises:
        InvalidInput: an argument is unknown, or a value is not allowed.
    """
    some = {name: value for name, value in given.items() if value is not None}
    for name, value in some.items():
        if name not in ALLOWED and _NEUTRAL.get(name) != value:
            only = f"; {name} must be {shown(_NEUTRAL[name])}" if name in _NEUTRAL else ""
            raise InvalidInput(
                f"gen_kwargs has {name} {shown(value)}, which is not supported{only}; it may have {', '.join(ALLOWED)}"
            )
    try:
        normal: dict[str, Any] = dict(normalize_gen_kwargs(some, MAX_GEN_TOKS))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"gen_kwargs is {shown(dict(given))}; a value is no number ({error})") from error
    if normal["max_gen_toks"] < 1:
        raise InvalidInput(f"gen_kwargs has max_gen_toks {normal['max_gen_toks']}; at least 1 token must be generated")
    temperature = float(normal.get("temperature", 0.0))
    if normal["do_sample"] and temperature == 0:
        raise InvalidInput(
            "gen_kwargs has do_sample true and no temperature; set a temperature above 0, or do_sample false"
        )
    until = list(normal["until"])
    if wrong := [text for text in until if not isinstance(text, str) or not text]:
        raise InvalidInput(
            f"gen_kwargs has until {shown(wrong[0])}; it must be text of at least one character, or a"
            " list of such texts"
        )
    sampling = {name: normal[name] for name in _SAMPLING if name in normal} | {"temperature": temperature}
    ends = () if end_token is None else (end_token,)
    params = SamplingParams(normal["max_gen_toks"], stop=tuple(until[:MAX_STOPS]), stop_token_ids=ends, **sampling)
    return GenerationWay(params, until)
