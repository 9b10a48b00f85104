"""All errors that flexengine raises on purpose, and how their messages show values: a message names the value, the
limit and the remedy."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from importlib import import_module
from typing import Any

from flexengine.places import place_of


def size(nbytes: float) -> str:
    """Return bytes with three digits and a unit, such as 1.23 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * factor:
            return f"{digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def size_within(nbytes: int, up: bool = True) -> str:
    """Return bytes as `size` does, as a limit: never less than the bytes, or never more if not `up`."""
    step = 10 ** max(0, len(str(nbytes)) - 3)
    return size((-(-nbytes // step) if up else nbytes // step) * step)


def size_option(nbytes: int, up: bool = True) -> str:
    """Return the limit `size_within` as the value of an option, such as 1.24GB, which `config.parse_size` reads."""
    return re.sub("[ ,]", "", size_within(nbytes, up))


def digits(x: float) -> str:
    """Return about three significant digits of a number, such as 0.123, 1.23 or 1,234."""
    places = 2 if x < 9.995 else 1 if x < 99.95 else 0
    return f"{x:.3g}" if 0 < x < 0.9995 else f"{x:,.{places}f}"


class FlexError(Exception):
    """Base of all errors that flexengine raises on purpose."""


class InvalidInput(FlexError, ValueError):
    """A parameter, policy, row or file that cannot be used as given."""


class UnsupportedModel(InvalidInput):
    """A model that the engine cannot run exactly. The message says why. Raised before any weight is read."""


class BadCheckpoint(InvalidInput):
    """A checkpoint whose files, tensors or shapes do not fit its config."""


class ModelNotFound(FlexError):
    """No model has the given name or path. The message lists what is allowed."""


class OutOfMemory(FlexError, MemoryError):
    """A tier has too little memory for an allocation.

    Attributes:
        tier: name of the tier.
        what: name of the allocation.
        needed: bytes of the allocation.
        used: bytes allocated before.
        capacity: bytes of the tier; 0 if the operating system, not the tier, has no more memory.
    """

    def __init__(
        self, tier: str, what: str, needed: int, used: int = 0, capacity: int | None = None, remedy: str = ""
    ) -> None:
        self.tier, self.what, self.needed, self.used, self.capacity = tier, what, needed, used, capacity or 0
        message = f"{tier} memory: {what} needs {size(needed)}, but "
        if capacity is None:
            message += "the system has no more"
        else:
            message += f"{size(used)} of {size(capacity)} are taken ({size(needed + used - capacity)} too much)"
        super().__init__(f"{message}; {remedy}" if remedy else message)


ONE_SEQUENCE = "the KV cache of one sequence"  # `OutOfMemory.what` begins with this text if shorter rows would fit
_OPTIONS = {"device": "set --device-mem {0} or more", "host": "set --host-mem {0} or more",
            "disk": "set --offload-dir to a directory with {1} free"}  # fmt: skip


def _option(tier: str, nbytes: int, engines: int) -> str:
    """Return the option that gives a tier as many bytes. engines: engines that share attention workers."""
    if place_of(tier).worker:
        each = f", of which each of {engines} processes gets a part" if engines > 1 else ""
        return f"set --worker-mem {size_option(nbytes * engines)} or more{each}"
    further = f"set --offload-dir (the directory of {tier}) to one with {{1}} free"
    return _OPTIONS.get(tier, further).format(size_option(nbytes), size_within(nbytes))


class TooLittle(OutOfMemory):
    """The given memory is too small for a job under any policy, or under the user's policy.

    The attributes of OutOfMemory are those of the first tier that must grow, with `used` 0.

    Attributes:
        needed: bytes of the whole tier that are enough.
        least: by tier, the fewest bytes with which the job runs, while the other tiers stay as given.
        parts: by tier, the purposes of these bytes, as `name size, name size`.

    Args:
        what: as in OutOfMemory.
        given: by tier, the bytes that are given.
        engines: engines that share attention workers; all bytes of these are those of one engine.
    """

    def __init__(
        self, what: str, least: Mapping[str, int], given: Mapping[str, int], parts: Mapping[str, str], engines: int = 1
    ) -> None:
        tier = next(iter(least))
        super().__init__(tier, what, least[tier], 0, given[tier])
        self.least, self.parts = dict(least), dict(parts)
        # A tier that cannot be used has 1 byte: see tier.machine.NO_DISK.
        available = {t: f"{size_within(n, up=False)} are given" for t, n in given.items()}
        if given.get("disk") == 1:
            available["disk"] = "none can be used"
        needs = " and ".join(
            f"{t} memory: at least {size_within(n)} are needed ({parts[t]}), {available[t]}" for t, n in least.items()
        )
        remedy = " and ".join(dict.fromkeys(_option(t, n, engines) for t, n in least.items()))
        self.args = (f"{needs}, too little for {what}; {remedy}",)


class BudgetTooSmall(InvalidInput):
    """The budget of mixed weights is less than the model takes in the smallest formats."""


class StageLost(FlexError):
    """A stage of a pipeline has died or hangs. Finished rows are in the journal."""

    def __init__(self, rank: int, size: int, name: str, why: str) -> None:
        super().__init__(f"stage {rank} of 0 to {size - 1} ({name}) is lost: {why}; run the same command again to"
                         " continue the job")  # fmt: skip


class StageFailed(FlexError):
    """A stage of a pipeline raised an error that this package does not raise on purpose."""


class WorkerLost(FlexError):
    """An attention worker has died, hangs, or could not answer. A job continues with a new worker. place: name of its
    place. why: what was noticed."""

    def __init__(self, place: str, name: str, why: str) -> None:
        super().__init__(f"attention worker {name} is lost: {why}")
        self.place, self.why = place, why


class MemberFailed(FlexError):
    """A member of a fleet failed while the job was running. Finished rows are in the journal."""


class RanOut(OutOfMemory):
    """Memory ran out while a job was running, and smaller plans did not help or the policy was given.

    Attributes:
        results: results of the rows that were finished, for `Engine.generate`, `chat` and `score`. Empty for `stream`,
            whose caller has them already, and for `run_job`, which stored them in the journal.
    """

    def __init__(self, tier: str, what: str, needed: int, message: str) -> None:
        super().__init__(tier, what, needed)
        self.args = (message,)
        self.results: list[Any] = []


def is_fault(error: BaseException) -> bool:
    """Return whether an error is of a library, not an interruption. Panics of Rust do not derive from Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def check_library(module: str, need: str, extra: str) -> None:
    """Raise InvalidInput if a library of an extra is not installed. need: what needs which library, for the message."""
    try:
        import_module(module)
    except ImportError as error:
        raise InvalidInput(f'{need} ({error}); pip install "flexengine[{extra}]"') from error


@contextmanager
def library_faults(what: str, kind: type[FlexError] = InvalidInput) -> Iterator[None]:
    """Raise an error of a kind for any error of a library or a template. what: what cannot be done, for the message."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, InvalidInput | kind) or not is_fault(error):
            raise
        raise kind(f"{what}: {fault_text(error)}") from error


def fault_text(error: BaseException) -> str:
    """Return the text of a library's error, with the name of its class if it is none that a user need not know."""
    name = type(error).__name__
    remedy = "; the model's tokenizer.json may be damaged" if name == "PanicException" else ""
    return str(error) if name == "TemplateFault" else f"{name}: {error}{remedy}"


def is_missing(value: Any) -> bool:
    """Return whether a value is one of those that say that there is none: NaN and NaT, or NA of pandas."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | Decimal) and bool(value != value)


# Characters that show something: no white space, control, blank letter (such as Braille's U+2800), annotation mark, or
# what Unicode calls Default_Ignorable_Code_Point.
VISIBLE = re.compile(
    r"[^\s\0-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U00013441\U00013442\U0001bca0-\U0001bca3\U0001d159"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def blankness(text: str) -> str:
    """Return "empty" or "blank" for a text without a visible character, for messages; "" for others."""
    return "empty" if not text else "" if VISIBLE.search(text) else "blank"


_WRITTEN_AS_JSON = (type(None), bool, list, tuple, dict)
_JSON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"), (str, "a string"), ((int, float), "a number"), ((list, tuple), "an array"),
    (Mapping, "an object"),
)  # fmt: skip


def json_kind(value: object) -> str:
    """Return the kind of a value in JSON's words, such as "an array", or the name of its type if JSON has no such
    kind."""
    if value is None:
        return "null"
    if is_missing(value):
        return f"missing ({str(value).strip('<>').replace('nan', 'NaN')})"
    return next((name for kind, name in _JSON_KINDS if isinstance(value, kind)), type(value).__name__)


def shown(value: object) -> str:
    """Return the value as text of one line for a message, at most about 80 characters.

    null, true, false, arrays and objects are written as in JSON. Values that Python refuses to print, such as numbers
    of thousands of digits, are named by their kind; tables, and values without text of their own, by their type.
    """
    try:
        text = _written(value)
    except (ValueError, RecursionError):
        text = f"{json_kind(value)} too long to print"
    except Exception:  # of the value's own method
        text = _typed(value)
    return cut(text)


def cut(text: str, most: int = 80) -> str:
    """Return a text for a message, at most `most` characters. Halves of surrogate pairs, which cannot be printed, are
    escaped."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else f"{text[: most - 4]} ..."


_MOST_LISTED, _MOST_NAME = 12, 100  # names in a message, and characters of each


def listed(names: Iterable[object], quoted: bool = False, last: str = " and ") -> str:
    """Return names as text, such as "a, b and c". Long names are cut; of many the first are named, and the number of
    others. quoted: write them in quotation marks. last: text before the last name."""
    given = list(map(str, names))
    most = len(given) if len(given) <= _MOST_LISTED + 1 else _MOST_LISTED
    some = [shown(name) if quoted else cut(name, _MOST_NAME) for name in given[:most]]
    if most < len(given):
        some, last = [*some, f"{len(given) - most:,} others"], " and "
    return f"{', '.join(some[:-1])}{last}{some[-1]}" if len(some) > 1 else "".join(some)


def format_words(name: str) -> str:
    """Return the name of a format of weights for messages: "FP8 128x128" for fp8-128x128."""
    family, _, rest = name.partition("-")
    return f"{family.upper()} {rest.replace('-', ' ')}".rstrip()


def bracketed(names: Iterable[object]) -> str:
    """Return names in quotation marks and brackets, as `listed` has them."""
    return f"[{listed(names, True, ', ')}]"


def _written(value: object) -> str:
    if isinstance(value, str | bytes | list | tuple):
        value = value[:81]  # more would be cut off, after it took time and memory
    if isinstance(value, _WRITTEN_AS_JSON):
        with suppress(TypeError):  # an array or an object that holds other values than JSON's
            return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(each)}" for key, each in value.items()) + "}"
    text = repr(value)
    return _typed(value) if not isinstance(value, str | bytes) and ("\n" in text or " at 0x" in text) else text


def _typed(value: object) -> str:
    name = type(value).__name__
    return f"a{'n' * (name[0] in 'AEIOUaeiou')} {name}"


def meant(word: str, known: Sequence[str]) -> str | None:
    """Return the known name that the user probably meant by a word: the word itself, the one name that begins with it,
    or the most similar one. Return None if there is none, or if several names begin with the word."""
    begins = [word] if word in known else [name for name in known if word and name.startswith(word)]
    begins = begins or alike(word, known)
    return begins[0] if len(begins) == 1 else None


def alike(word: str, known: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return the known name that is most similar to a word, in any case; [] if none is. cutoff: of difflib."""
    import difflib

    return difflib.get_close_matches(word, known, 1, cutoff) or difflib.get_close_matches(
        word.lower(), known, 1, cutoff
    )


def json_fault(error: ValueError | RecursionError) -> str:
    """Return why `json.loads` refused a text. error: the error of `json.loads`."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if "integer string conversion" in str(error):  # Python's own message advises to change an interpreter setting
        return f"a whole number has over {sys.get_int_max_str_digits():,} digits"
    return str(error)
