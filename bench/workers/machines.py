"""Two network namespaces that stand for two machines, and a network between them with a rate and a delay.

Needs root on Linux, `ip` and `tc`. The rate is a token bucket (tbf). The delay is netem's where the kernel has it. Else
a process per machine carries the packets of a tun device, and holds each of them for the delay.

python -m bench.workers.machines NAME FD SECONDS: carry packets between device NAME and a datagram socket.
"""

import fcntl
import os
import queue
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from bench.harness import REPO

NETWORK = "10.78.0"
ADDRESSES = (f"{NETWORK}.1", f"{NETWORK}.2")
INTERFACE = "link0"  # name of the interface, in both
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_QUEUED = 4096  # packets between a device and its process


def ip(words: str, check: bool = True) -> bool:
    """Run `ip` with arguments. Return whether it succeeded."""
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"ip {words}: {done.stderr.strip()}"
    return done.returncode == 0


def missing(delay: bool = False) -> str:
    """Return why this process cannot make machines; "" if it can. delay: whether their network is to have one."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need root, ip and tc"
    if delay and not (has_netem() or os.access("/dev/net/tun", os.R_OK | os.W_OK)):
        return "a delay needs netem in the kernel, or /dev/net/tun"
    name = f"flexengine-{os.getpid()}-probe"
    if not ip(f"netns add {name}", check=False):
        return "this system allows no network namespaces"
    try:
        return "" if _tc(name, "lo", "tbf rate 1gbit burst 256k latency 50ms") else "the kernel has no tbf"
    finally:
        ip(f"netns delete {name}")


def has_netem() -> bool:
    """Return whether the kernel delays packets by itself."""
    name = f"flexengine-{os.getpid()}-netem"
    if not ip(f"netns add {name}", check=False):
        return False
    try:
        return _tc(name, "lo", "netem delay 1ms")
    finally:
        ip(f"netns delete {name}")


def _tc(namespace: str, interface: str, discipline: str, place: str = "root") -> bool:
    words = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, *place.split()]
    return subprocess.run([*words, *discipline.split()], capture_output=True).returncode == 0


class TwoMachines:
    """Two network namespaces, with ADDRESSES at their INTERFACE. They and all their processes end with the block.

    Args:
        megabits: rate of each direction, in Mbit/s; None for no limit.
        delay: seconds for which a packet is on its way; 0 for no delay.
    """

    def __init__(self, megabits: float | None = None, delay: float = 0.0) -> None:
        self.megabits, self.delay = megabits, delay
        self.names = tuple(f"flexengine-{os.getpid()}-{number}" for number in (0, 1))
        self.netem = delay > 0 and has_netem()
        self._stack = ExitStack()

    def __enter__(self) -> "TwoMachines":
        with self._stack:
            for name in self.names:
                ip(f"netns add {name}")
                self._stack.callback(ip, f"netns delete {name}", check=False)
                ip(f"-n {name} link set lo up")
            if self.delay and not self.netem:
                self._join_by_processes()
            else:
                first, second = self.names
                ip(f"-n {first} link add {INTERFACE} type veth peer name {INTERFACE} netns {second}")
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip(f"-n {name} address add {address}/24 dev {INTERFACE}")
                ip(f"-n {name} link set {INTERFACE} up")
                self._shape(name)
            self._stack = self._stack.pop_all()
        return self

    def _shape(self, name: str) -> None:
        place = "root handle 1:"
        if self.netem:
            assert _tc(name, INTERFACE, f"netem delay {1e3 * self.delay:g}ms limit 100000", place)
            place = "parent 1:1 handle 10:"
        if self.megabits:
            burst = max(32_000, int(self.megabits * 1e6 / 8 / 250))  # bytes in 4 ms, a tick of the kernel
            shape = f"tbf rate {self.megabits:g}mbit burst {burst} latency 200ms"
            assert _tc(name, INTERFACE, shape, place)

    def _join_by_processes(self) -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for number, end in enumerate(ends):
            with end:
                words = [sys.executable, "-m", __name__, INTERFACE, str(end.fileno()), str(self.delay)]
                process = self.start(number, words, pass_fds=[end.fileno()], stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"ready"

    def start(
        self, number: int, words: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start a process on a machine, 0 or 1, which finds this checkout in any directory. options: of Popen."""
        path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
        made = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        process = subprocess.Popen(["ip", "netns", "exec", self.names[number], *words], env=made, **options)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def bytes_received(self, number: int) -> int:
        """Return the bytes that a machine has got from the other one."""
        words = ["ip", "netns", "exec", self.names[number], "cat", f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


def carry(name: str, descriptor: int, seconds: float) -> None:
    """Carry packets between a tun device and a socket, whose other end is that of the other machine. Each packet waits
    for some seconds before it enters the device."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    end = socket.socket(fileno=descriptor)
    arrived = queue.Queue[tuple[float, bytes]](_QUEUED)
    print("ready", flush=True)

    def leave() -> None:
        while True:
            end.send(os.read(device, 1 << 16))

    def arrive() -> None:
        while packet := end.recv(1 << 16):
            arrived.put((time.monotonic() + seconds, packet))
        os._exit(0)

    for run in (leave, arrive):
        threading.Thread(target=run, daemon=True).start()
    while True:
        due, packet = arrived.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            os.write(device, packet)
        except OSError:  # the device is not up yet
            continue


if __name__ == "__main__":
    carry(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
