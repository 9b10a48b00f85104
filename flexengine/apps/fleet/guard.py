"""Limits which programs can connect to a Ray cluster: Ray runs any code that a connected program sends. This module
does not import Ray, as `prepare` must run before Ray is imported.

Ray 2.60 proves a token at every connection (RAY_AUTH_MODE=token), and draws one for a cluster that `ray.init` starts;
`ray start` has none unless the user makes it.
"""

import os
import secrets
from collections.abc import Iterable

from flexengine.errors import InvalidInput
from flexengine.guests.wire.secret import is_loopback

LOCAL = "local"  # address: a Ray that this process starts
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
GUARDED, OPEN = "token", "disabled"  # values of MODE
# With 0, all processes of a Ray that this machine starts listen on the loopback interface; read when Ray is imported.
_OTHER_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def prepare(address: str) -> None:
    """Let a Ray that this process starts listen on the loopback interface only, and ask for a token that is drawn for
    it, unless the environment says otherwise. address: value of --ray; other ones than LOCAL change nothing."""
    if address != LOCAL:
        return
    os.environ.setdefault(_OTHER_MACHINES, "0")
    if os.environ.setdefault(MODE, GUARDED) == GUARDED and not (TOKEN in os.environ or TOKEN_FILE in os.environ):
        os.environ[TOKEN] = secrets.token_hex(32)


def check_guarded(address: str, machines: Iterable[str]) -> None:
    """Raise InvalidInput if other machines can reach a cluster that asks for no token, unless the user has said so by
    RAY_AUTH_MODE=disabled.

    Args:
        address: value of --ray.
        machines: addresses of the cluster's machines.
    """
    reached = next((machine for machine in machines if not is_loopback(machine)), None)
    if reached is None or os.environ.get(MODE, "").lower() in (GUARDED, OPEN):
        return
    raise InvalidInput(
        f"--ray is {address}, whose machine {reached} runs what any program sends to its ports, as Ray asks for no"
        f" token there; set {MODE}={GUARDED} and {TOKEN_FILE} for `ray start` and for this command, or, if a firewall"
        f" guards these ports, {MODE}={OPEN}"
    )
