"""Engines of deployments, by their arguments. Each is opened once in a process, and closed at its end."""

import atexit
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flexengine.apps.helm.requests import Encoding
from flexengine.apps.lm_eval.arguments import engine_options
from flexengine.engine.engine import Engine
from flexengine.lossy import Lossy

OWN = ("apply_chat_template", "end_of_text_token", "model_logprobs")  # arguments that are not the engine's
_DECIDE = ("model", "pretrained", "device", "dtype", "lossy", "allow", *(f.name for f in fields(Lossy)))
_ENGINES: dict[str, Engine] = {}


def engine_of(args: Mapping[str, Any]) -> Engine:
    """Return the engine of a deployment. No weights are read.

    Raises:
        InvalidInput: an argument is unknown or wrong, or the checkpoint has no tokenizer.
        FlexError: as for `Engine`.
    """
    given = {name: value for name, value in args.items() if name not in OWN and value is not None}
    key = json.dumps(given, sort_keys=True, default=str)
    if key not in _ENGINES:
        device = given.pop("device", None)
        engine = Engine(**engine_options(given, device, "the deployment", OWN))
        atexit.register(engine.close)
        Encoding.of(engine.tokenizer)  # raises if there is no tokenizer
        _ENGINES[key] = engine
    return _ENGINES[key]


def encoding_of(args: Mapping[str, Any]) -> Encoding:
    """Return the encoding of a deployment. Raise as `engine_of`, and InvalidInput if there is no chat template though
    one is to be applied."""
    return Encoding.of(engine_of(args).tokenizer, args.get("apply_chat_template"), args.get("end_of_text_token"),
                       bool(args.get("model_logprobs")))  # fmt: skip


def decisive(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that results depend on, beside the rows: those of the model and its numbers, not those of
    memory."""
    return {name: args[name] for name in _DECIDE if args.get(name) is not None}
