"""The group of processes of a pipeline: values that all exchange."""

import threading
import time
from typing import Any

import pytest

from flexengine.parallel import group
from flexengine.parallel.group import Group


class Store:
    """A store whose `wait` must not be called, as heartbeats use the same connection."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, *_: Any) -> None:
        raise AssertionError("a thread waits in the store")


def member(store: Store, rank: int) -> Group:
    made: Group = object.__new__(Group)
    made.rank, made.size, made._store = rank, 2, store
    return made


def test_values_are_exchanged_without_waiting_in_the_store() -> None:
    store, found = Store(), list[list[str]]()
    thread = threading.Thread(target=lambda: found.append(member(store, 1).exchange("key", "b")))
    thread.start()
    time.sleep(0.1)
    assert found == []
    assert member(store, 0).exchange("key", "a") == ["a", "b"]
    thread.join(30)
    assert found == [["a", "b"]]


def test_a_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOIN_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"stages 1 did not come within 0\.1 s"):
        member(Store(), 0).exchange("key", "a")
