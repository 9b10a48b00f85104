"""flexengine cache: list and clear what was prepared: converted models, encoded weights, kernels, rates."""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.config import cache_root
from flexengine.errors import InvalidInput, shown
from flexengine.plan.formatting import count, plain, size
from flexengine.shell.cachedir import KINDS, CacheItem, Contents, Kept, contents, hub_cache, remove
from flexengine.shell.commands.messages import DONE, SOME_FAILED, ago, program, say, table
from flexengine.shell.commands.options import add_options
from flexengine.shell.commands.parser import Parser

_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}  # seconds
_MIN_KEY = 4  # characters of a key that `clear` accepts
_END = """\
KIND is models (converted), weights (encoded), calibrations, kernels, rates (of the machine), unfinished (encoding that
was interrupted; a job continues with it) or leftovers (of killed jobs). NAME is a name in the list, or that of a model.
"""
_OPTIONS = """
--older-than AGE  only what was not used for this time, such as 12h, 30d or 8w
--yes             clear without a question
--json            print one JSON object
"""


def parser() -> Parser:
    p = Parser("cache", "[list|clear] [KIND|NAME ...]", _END, "Jobs make again what they need.")
    actions = "list (default), or clear: remove what no job uses"
    p.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help=actions)
    p.add_argument("names", nargs="*", metavar="KIND|NAME", help="only these (default: all)")
    add_options(p, _OPTIONS)
    return p


def run(args: argparse.Namespace) -> int:
    """List or clear the cache and return the exit code. Raise InvalidInput if an option is wrong."""
    seconds = None if args.older_than is None else age(args.older_than)
    if args.yes and args.action != "clear":
        raise InvalidInput("--yes has no effect without clear; remove it, or write: flexengine cache clear --yes")
    try:
        cached = contents(cache_root())
    except OSError as error:
        fault = f"the cache {error.filename or cache_root()} cannot be read: {error.strerror}"
        raise InvalidInput(f"{fault}; set FLEXENGINE_CACHE to a directory") from error
    items = [item for item in selected(cached, args.names) if seconds is None or time.time() - item.used > seconds]
    if args.action == "list":
        _print_list(cached, items, args.json)
        return DONE
    return _clear(cached, items, args)


def age(text: str) -> float:
    """Return the seconds of an age such as 30d. Raise InvalidInput if the text is no age."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([mhdw])", text.strip())
    if match is None:
        remedy = "it must be a number with m, h, d or w (minutes, hours, days or weeks), such as 30d"
        raise InvalidInput(f"--older-than is {shown(text)}; {remedy}")
    return float(match[1]) * _UNITS[match[2]]


def selected(cached: Contents, names: Sequence[str]) -> list[CacheItem]:
    """Return the items of these kinds and names; all without names. Raise InvalidInput if a name is unknown."""
    if not names:
        return list(cached.items)
    chosen = set()
    for name in names:
        ours = {item for item in cached.items if _is_named(item, name)}
        if not ours and name not in KINDS:
            remedy = f"give a kind ({', '.join(KINDS)}) or a name that flexengine cache lists"
            raise InvalidInput(f"{shown(name)} is not in the cache {cached.root}; {remedy}")
        chosen |= ours
    return [item for item in cached.items if item in chosen]


def _is_named(item: CacheItem, name: str) -> bool:
    if name == item.kind or (item.source and name in (item.model, Path(item.source).name, item.source)):
        return True
    return len(name) >= _MIN_KEY and (item.file.startswith(name) or item.file.removeprefix("cpu-").startswith(name))


# Listing.


def _print_list(cached: Contents, items: Sequence[CacheItem], as_json: bool) -> None:
    (hub, downloads), total = hub_cache(), sum(item.bytes for item in items)
    if as_json:
        ignored = [{"path": path, "reason": reason} for path, reason in cached.ignored]
        hub_json = {"path": str(hub), "bytes": downloads}
        listed = {"bytes": total, "items": list(map(_fields, items)), "ignored": ignored, "hub": hub_json}
        print(json.dumps({"cache": str(cached.root), **listed}))
        return
    print(f"{plain(cached.root)}: {count(len(items), 'item', 'items')}, {size(total)}")
    if items:
        print(f"\n{table([_HEAD, *map(_cells, items)], right=(3,))}\n")
    for path, reason in cached.ignored:
        print(f"ignored: {plain(path)} ({reason})")
    if items:
        print("flexengine cache clear NAME removes one of them, or all of a kind")
    print(f"not included: downloads from the hub, {size(downloads)} in {plain(hub)}; `hf cache` manages them")


_HEAD = ("kind", "name", "model", "size", "last use", "state", "path")


def _cells(item: CacheItem) -> tuple[str, ...]:
    model = plain(item.model) + (f" ({plain(item.label)})" if item.label else "")
    return (item.kind, item.name, model, size(item.bytes), ago(item.used), item.busy, f"{item.folder}/{item.file}")


def _fields(item: CacheItem) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "name": item.name,
        "path": f"{item.folder}/{item.file}",
        "model": item.source or None,
        "format": item.label or None,
        "bytes": item.bytes,
        "last_use": item.used,
        "busy": item.busy or None,
    }


# Clearing.


def _clear(cached: Contents, items: Sequence[CacheItem], args: argparse.Namespace) -> int:
    """Remove items, print what was freed, and return the exit code."""
    free = [item for item in items if not item.busy]
    if free and not args.yes and not _agreed(cached, free):
        say("nothing was removed")
        return DONE
    removed: list[CacheItem] = []
    kept: list[tuple[CacheItem, str]] = []
    code = DONE
    for item in items:
        try:
            remove(cached.root, item)
            removed.append(item)
        except Kept as reason:
            kept.append((item, str(reason)))
        except OSError as error:
            kept.append((item, f"cannot be removed: {error.strerror}"))
            code = SOME_FAILED
    freed = sum(item.bytes for item in removed)
    if args.json:
        reasons = [_fields(item) | {"reason": why} for item, why in kept]
        done = {"freed_bytes": freed, "removed": list(map(_fields, removed)), "kept": reasons}
        print(json.dumps({"cache": str(cached.root), **done}))
    else:
        for item, why in kept:
            print(f"kept: {_title(item)} ({plain(why)})")
        print(f"removed {count(len(removed), 'item', 'items')}, {size(freed)} freed")
    return code


def _agreed(cached: Contents, items: Sequence[CacheItem]) -> bool:
    """Ask on a terminal whether to remove the items. Raise InvalidInput if standard input is no terminal."""
    what = f"{count(len(items), 'item', 'items')}, {size(sum(item.bytes for item in items))}, from {plain(cached.root)}"
    if not sys.stdin.isatty():
        raise InvalidInput(f"clear would remove {what}; without a terminal it needs --yes")
    for item in items:
        print(_title(item), file=sys.stderr)
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _title(item: CacheItem) -> str:
    model = f" of {plain(item.model)}" if item.model else ""
    label = f" ({plain(item.label)})" if item.label else ""
    return f"{item.kind} {item.name}{model}{label}, {size(item.bytes)}"


main = program(lambda words: run(parser().parse_args(words)))
