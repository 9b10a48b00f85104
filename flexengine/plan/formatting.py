"""Format numbers and names for messages. Sizes are in decimal units: 1 GB is 10**9 bytes."""

from flexengine.errors import digits as digits
from flexengine.errors import size as size
from flexengine.places import Lane, lane_of

BAR_CHARACTERS = 40  # length of a bar in a report
MIN_RATED = 2  # rows or tokens from which there is a rate
MIN_PER_SECOND = 0.01  # lower rates are shown per hour


def clock(seconds: float) -> str:
    """Return seconds as text: below a minute as 12.3 s, else as h:mm:ss."""
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def duration(seconds: float) -> str:
    """Return seconds as text with three digits and a unit, such as 1.23 ms."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{digits(seconds / factor)} {unit}"
    return f"{digits(seconds * 1e9)} ns" if seconds > 0 else "0 s"


def rate(number: float, seconds: float, unit: str) -> str:
    """Return a number in some seconds as a rate, such as 12.3 rows/s; "" if it is below MIN_RATED, or took no time."""
    return pace(number / seconds, unit) if number >= MIN_RATED and seconds > 0 else ""


def pace(rate: float, unit: str) -> str:
    """Return a rate per second as text, per hour if it is low: 12.3 rows/s, 18.0 rows/h."""
    return f"{digits(rate)} {unit}/s" if rate >= MIN_PER_SECOND else f"{digits(3600 * rate)} {unit}/h"


def count(number: int, one: str, many: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {one if number == 1 else many}"


def percent(share: float) -> str:
    """Return a share in percent. Shares above 0 that round to 0 give <1 %."""
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def lane_name(lane: str, shared: bool) -> str:
    """Return the name of a lane in reports. shared: whether host and device are one memory."""
    known = lane_of(lane)
    if known.of_disk:
        return lane.replace("_", " ")
    if known.of_worker:
        return worker_lane(known)
    if known.place:
        return f"{known.place} to device" if known.way == "h2d" else f"device to {known.place}"
    names = {"h2d": "RAM to slot" if shared else "host to device", "d2h": "device to host", "device": "compute",
             "cpu": "host compute"}  # fmt: skip
    return names.get(lane, lane)


def worker_lane(lane: Lane) -> str:
    """Return the work of an attention worker's lane."""
    work = dict(send="questions to", attend="attention of", fetch="answers of", write="pages to", read="pages of")
    return f"{work[lane.way]} {lane.place}"


def place_name(place: str, shared: bool) -> str:
    """Return the name of a place in reports. Without a GPU, the places device and host are both RAM."""
    return {"device": "RAM", "host": "RAM as stored"}.get(place, place) if shared else place


def plain(value: object, keep: str = "") -> str:
    """Return the value as text of printable characters. Other characters, such as terminal controls, are escaped.

    Args:
        keep: characters that stay although they are not printable, such as a newline.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in str(value))
