"""The harness's cache of responses (--use_cache), an SQLite file.

The harness finds a response by its request alone. Here the file also has a record of the model that gave the responses,
so that another model does not take them for its own.
"""

import json
import logging
from collections.abc import MutableMapping
from typing import Any

from flexengine.activity import message
from flexengine.engine.engine import Engine
from flexengine.errors import InvalidInput
from flexengine.job.same_job import LOSSY, MODEL_FILES, differences

RECORD = "flexengine"  # key of the record; keys of responses are digests


def check_cache(stored: MutableMapping[str, Any], engine: Engine, options: dict[str, Any]) -> None:
    """Compare the cache's record with the model, and add it to a cache without one.

    Args:
        options: further values that responses depend on, by name.

    Raises:
        InvalidInput: the cache has responses of another model.
    """
    was, allow = stored.get(RECORD) or {}, engine.options.allow
    model = engine.fingerprint(was.get(MODEL_FILES, {}))
    if allow:
        model.pop("cache", None)  # the planner chooses it
    lossy = {"allow": sorted(allow)} if allow else engine.switches
    now = json.loads(json.dumps({**options, **model, LOSSY: lossy}))  # tuples become lists
    if was and (changed := differences(was, now)):
        raise InvalidInput(
            f"the cache of --use_cache holds responses of another model: {'; '.join(changed)}; name"
            " another file, or give the same model and options"
        )
    if not was and len(stored):
        message(
            "the cache of --use_cache does not say which model gave its responses; they are taken as this model's",
            logging.WARNING,
        )
    stored[RECORD] = now
