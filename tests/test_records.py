"""The check of records: types, ranges, names, lists, objects and nested records, each refused with name and limit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from flexengine.errors import InvalidInput
from flexengine.records import Limit, check, check_argument, read


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Limit(0, 1)]
    count: int = 3


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, ("a", "b")] = "a"
    size: Annotated[int | None, Limit(1, 2000), ", or None"] = None
    on: bool = False
    words: tuple[str, ...] = ()
    pair: Annotated[tuple[float, float], Limit(2, 2), "two numbers"] = (0.0, 0.0)
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    rates: Mapping[str, Annotated[float, Limit(0), "a rate"]] = field(default_factory=dict)
    file: Annotated[str | Path | None, "the name of a file"] = None
    text: Annotated[str, Limit(1)] = "x"

    def __post_init__(self) -> None:
        check(self, "outer ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "c"}, "outer name is 'c'; it must be one of a, b"),
        ({"name": 1}, "outer name is 1; it must be one of a, b"),
        ({"size": 0}, "outer size is 0; it must be a whole number of at least 1 and at most 2,000, or None"),
        ({"size": True}, "outer size is True; it must be a whole number"),
        ({"size": 2.5}, "outer size is 2.5; it must be a whole number"),
        ({"on": 1}, "outer on is 1; it must be True or False"),
        ({"on": None}, "outer on is None; it must be True or False"),
        ({"words": [1]}, "outer words[0] is 1; it must be text"),
        ({"words": 1}, "outer words is 1; it must be a list of texts"),
        ({"pair": [1]}, "outer pair is [1]; it must be two numbers"),
        ({"pair": [1, "x"]}, "outer pair[1] is 'x'; it must be a number"),
        ({"inner": 4}, "outer inner is 4; it must be an object of fields"),
        ({"inner": {"share": 2}}, "outer inner: share is 2; it must be a number of at least 0 and at most 1"),
        ({"inner": {}}, "outer inner lacks fields ['share']"),
        ({"many": [{"share": 1}, {"share": float("nan")}]}, "outer many[1]: share is nan"),
        ({"many": [{"share": 1, "cuont": 2}]},
         "outer many[0] has unknown fields ['cuont']; it takes ['count', 'share'];"
         " did you mean count?"),
        ({"rates": []}, "outer rates is []; it must be an object"),
        ({"rates": {"x": -1}}, "outer rates x is -1; it must be a rate"),
        ({"rates": {"x": 10**400}}, "outer rates x is 1000"),
        ({"file": ""}, "outer file is ''; it must be the name of a file"),
        ({"file": "a\0"}, "; it must be the name of a file"),
        ({"file": 3}, "outer file is 3; it must be the name of a file"),
        ({"text": ""}, "outer text is ''; it must be text"),
    ],
)  # fmt: skip
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Outer(**given)
    assert str(caught.value).startswith(message) or message in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        read(Outer, given, "file f.json")
    assert str(caught.value).startswith("file f.json: ")


def test_values_get_the_form_of_their_types() -> None:
    made = read(Outer, {"words": "one", "pair": [1, 2], "inner": {"share": 1}, "rates": {"x": 3}, "size": 7}, "file")
    assert made == Outer(words=("one",), pair=(1.0, 2.0), inner=Inner(1.0), rates={"x": 3.0}, size=7)
    assert type(made.pair[0]) is type(made.rates["x"]) is float
    assert made.inner is not None
    assert type(made.inner.share) is float  # a record without rules of its own is checked, too
    assert Outer(file=Path("a")).file == Path("a")


def test_numbers_of_numpy_become_those_of_python() -> None:
    made = Outer(pair=(np.float64(1.5), np.float64(2.5)), inner=read(Inner, {"share": np.float64(0.5)}, "file"))
    assert made.inner is not None
    assert [type(number) for number in (*made.pair, made.inner.share)] == [float] * 3
    size: Any = np.int64(3)
    assert type(Outer(size=size).size) is int
    words: Any = np.array(["a", "b"])
    assert Outer(words=words).words == ("a", "b")
    with pytest.raises(InvalidInput, match=r"size is 2\.5; it must be a whole number"):
        Outer(size=np.float64(2.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_whole_numbers_that_no_float_holds(number: int) -> None:
    with pytest.raises(InvalidInput, match=r"rate is -?10{70,} \.\.\.; it must be any rate"):
        check_argument("rate", number, Annotated[float, Limit(-math.inf, math.inf), "any rate"])


@pytest.mark.parametrize(("given", "shown"), [(None, "null"), ([], "[]"), (3, "3"), ("text", "'text'")])
def test_what_is_no_object(given: object, shown: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(Inner, given, "file f.json")
    assert str(caught.value) == f"file f.json is {shown}; it must be an object of fields"


def test_many_unknown_fields_do_not_fill_the_screen() -> None:
    with pytest.raises(
        InvalidInput, match=r"^f\.json has unknown fields \['x0', 'x1', .*'x\d+' and 988 others\]; it takes"
    ):
        read(Inner, {f"x{i}": i for i in range(1000)}, "f.json")


def test_arguments() -> None:
    check_argument("limit", 3, Annotated[int | None, Limit(1)])
    check_argument("limit", None, Annotated[int | None, Limit(1)])
    with pytest.raises(InvalidInput, match="limit is 0; it must be a whole number of at least 1"):
        check_argument("limit", 0, Annotated[int | None, Limit(1)])
    with pytest.raises(InvalidInput, match=r"inner is \{.*; it must be an Inner"):  # its text asks for a record
        check_argument("inner", {"share": 1}, Annotated[Inner, "an Inner"])
