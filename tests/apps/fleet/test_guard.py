"""Who can reach a Ray cluster: a Ray of this process's own, and clusters of others."""

import os
from contextlib import nullcontext

import pytest

from flexengine.apps.fleet import guard
from flexengine.errors import InvalidInput


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (guard.MODE, guard.TOKEN, guard.TOKEN_FILE, guard._OTHER_MACHINES):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_a_ray_of_ones_own_has_a_token_and_stays_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    guard.prepare("auto")
    guard.prepare("10.0.0.1:6379")
    assert guard.MODE not in os.environ
    tokens = set()
    for _ in range(2):
        guard.prepare(guard.LOCAL)
        assert os.environ[guard.MODE] == "token"
        assert os.environ[guard._OTHER_MACHINES] == "0"
        tokens.add(os.environ.pop(guard.TOKEN))
    assert [len(token) for token in tokens] == [64, 64]  # each start draws another one


@pytest.mark.parametrize("given", [
    {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "a"},
])  # fmt: skip
def test_what_the_user_says_stays(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    guard.prepare(guard.LOCAL)
    assert {name: os.environ[name] for name in given} == given
    assert os.environ.get(guard.TOKEN) == given.get(guard.TOKEN)


@pytest.mark.parametrize(("mode", "machines", "good"), [
    (None, ["127.0.0.1"], True),
    (None, [], True),
    (None, ["127.0.0.1", "10.0.0.2"], False),
    ("", ["10.0.0.2"], False),
    ("token", ["10.0.0.2"], True),
    ("Token", ["10.0.0.2", "10.0.0.3"], True),
    ("disabled", ["10.0.0.2"], True),
])  # fmt: skip
def test_an_open_cluster_is_refused(
    mode: str | None, machines: list[str], good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode is not None:
        monkeypatch.setenv(guard.MODE, mode)
    why = r"--ray is auto, whose machine 10\.0\.0\.2 runs what any program sends .* RAY_AUTH_MODE=token and RAY_AUTH_TO"
    with nullcontext() if good else pytest.raises(InvalidInput, match=why):
        guard.check_guarded("auto", machines)
