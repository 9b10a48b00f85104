"""Numbers and names as people read them. Sizes are in decimal units: 1 GB is 10**9 bytes."""

import math

from flexengine.places import is_disk


def size(nbytes: float) -> str:
    """Bytes with three digits, such as 1.23 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * factor:
            return f"{digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def clock(seconds: float) -> str:
    """Seconds below a minute as such, from there on as h:mm:ss."""
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def digits(x: float) -> str:
    """About three significant digits."""
    places = 2 if x < 9.995 else 1 if x < 99.95 else 0
    return f"{x:.3g}" if 0 < x < 0.9995 else f"{x:,.{places}f}"


def count(number: int, one: str, many: str) -> str:
    """How many there are of something: 1 row, 2,000 rows."""
    return f"{number:,} {one if number == 1 else many}"


def upward(x: float) -> str:
    """Four significant digits of a positive number, no less than it."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 3)
    return f"{math.ceil(x / unit - 1e-9) * unit:.4g}"


def percent(share: float) -> str:
    """A share; what is there but rounds to nothing shows as <1 %."""
    return "<1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")


def lane_name(lane: str, shared: bool) -> str:
    """Return what a lane is called in reports. shared: host and device are one memory."""
    if is_disk(lane):
        return lane.replace("_", " ")
    names = {"h2d": "RAM to slot" if shared else "host to device", "d2h": "device to host", "device": "compute",
             "cpu": "host compute"}  # fmt: skip
    return names.get(lane, lane)


def place_name(place: str, shared: bool) -> str:
    """Return what a place is called in reports. On a machine without a GPU both kinds of weights in RAM are RAM."""
    return {"device": "RAM", "host": "RAM as stored"}.get(place, place) if shared else place
