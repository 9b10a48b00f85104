"""Lanes of attention workers: routes, and the kind of lane on a GPU."""

import pytest

from flexengine.places import Routes, by_way, worker_names
from flexengine.runtime import lane as lanes

PLACES = ("device", "host", "disk", *worker_names(2))


def test_routes() -> None:
    """Pages pass through host staging beside a GPU; questions have lanes of their own on every machine."""
    staged, direct = (Routes.between(PLACES, staged) for staged in (True, False))
    assert staged.store["worker2"] == ("d2h_worker2", "worker2_write")
    assert staged.load["worker2"] == ("worker2_read", "h2d_worker2")
    assert direct.store["worker2"] == ("worker2_write",)
    for routes in (staged, direct):
        assert routes.attend["worker1"] == ("worker1_send", "worker1", "worker1_fetch")
    assert "host" in staged.attend
    assert "host" not in direct.attend
    assert by_way(["worker1_write", "device", "worker1_read", "d2h_worker1", "h2d"]) == [
        "worker1_read", "h2d", "device", "d2h_worker1", "worker1_write",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stream"),
    [("worker1_send", True), ("worker1", False), ("worker1_fetch", True), ("worker1_write", False),
     ("worker1_read", False), ("h2d_worker1", True)],
)  # fmt: skip
def test_lanes_of_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, stream: bool) -> None:
    """A lane that copies from or to the GPU needs a stream, whose events the device's lane waits for."""
    monkeypatch.setattr(lanes, "Stream", lambda name: name)
    lane = lanes.new_lane("stream", name)
    assert (lane == name) == stream
    if isinstance(lane, lanes.LaneRunner):
        lane.close()
