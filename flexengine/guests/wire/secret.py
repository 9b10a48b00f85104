"""The secret that processes share, and its proof, which is the first thing that a connection over a network carries.

Both sides draw a nonce, and send the HMAC-SHA256 of a purpose and both nonces: first the side that connects, then the
side that accepts. Every part has a fixed length, so no program without the secret decides how much is stored.
"""

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path

from flexengine.config import cache_root
from flexengine.errors import InvalidInput
from flexengine.guests.wire.link import Broken
from flexengine.guests.wire.processes import SECRET, SECRET_FILE

MIN_SECRET, MAX_SECRET = 16, 4096  # bytes
PROOF_SECONDS = 5.0  # from the start of a connection, until the secret must be proved
OPENING = b"flexengine proof"  # before a purpose and a nonce
PURPOSE_BYTES = 16
NONCE_BYTES = PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)  # sent in place of a proof
REMEDY = f"give both processes the same secret: set {SECRET_FILE} to the same file, or {SECRET} to the same text"


class NoSecret(InvalidInput):
    """Connections of other machines need a secret."""


class WrongSecret(Broken):
    """The other process has another secret."""


class EndedEarly(Broken):
    """The other process ended the connection before it said anything wrong; it may have too many."""


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach an address. False for an empty one: all interfaces."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def secret_for(host: str) -> bytes:
    """Return the secret for connections to or at an address: that of the environment. On the loopback interface, that
    of the user's cache otherwise, which is drawn when there is none.

    Raises:
        NoSecret: there is none for another address.
        InvalidInput: it is too short, or its file cannot be read, is public or belongs to another user.
    """
    if given := given_secret():
        return os.fsencode(given)
    if is_loopback(host):
        return _own().encode()
    where = host or "all interfaces"
    raise NoSecret(
        f"connections at {where} can come from other machines, but there is no secret; set {SECRET_FILE} to a file with"
        f" at least {MIN_SECRET} random bytes, the same on all machines, such as: (umask 077; openssl rand -hex 32 >"
        " secret), or give it by --secret-file"
    )


def given_secret() -> str:
    """Return the secret of the environment; "" if there is none. Raise InvalidInput as `secret_for`."""
    text, path = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if text and path:
        raise InvalidInput(f"{SECRET} and {SECRET_FILE} are both set; unset one of them")
    if text:
        return _checked(text, SECRET)
    return _read(Path(path)) if path else ""


def take_file(path: str) -> None:
    """Make the secret in a file that of this process and of those that it starts, in place of another in the
    environment. Raise InvalidInput as `secret_for`."""
    _read(Path(path))
    os.environ[SECRET_FILE] = path
    os.environ.pop(SECRET, None)


def _checked(text: str, name: str) -> str:
    if not MIN_SECRET <= (size := len(os.fsencode(text := text.strip()))) <= MAX_SECRET:
        raise InvalidInput(f"the secret in {name} has {size} bytes; it must have {MIN_SECRET} to {MAX_SECRET}")
    return text


def _read(path: Path, own: bool = False) -> str:
    """Return the secret in a file. own: it is in this user's cache; else it may be root's or the group's."""
    try:
        with path.open("rb") as file:
            state, user = os.fstat(file.fileno()), os.geteuid()
            if state.st_uid not in (user, user if own else 0):
                raise InvalidInput(f"the secret in {path} belongs to user {state.st_uid}, not to {user}; take your own")
            if state.st_mode & (0o077 if own else 0o007):
                raise InvalidInput(f"the secret in {path} is open to other users; run: chmod 600 {path}")
            return _checked(os.fsdecode(file.read(MAX_SECRET + 1)), str(path))
    except OSError as error:
        raise InvalidInput(
            f"the secret in {path} cannot be read ({error.strerror or error}); set {SECRET_FILE} to a file that can"
        ) from error


def _own() -> str:
    path = cache_root() / "secret"
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # only this user can read it
                file.write(secrets.token_hex(NONCE_BYTES).encode())
                file.flush()
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
    except OSError as error:
        why = f"the secret of this user cannot be kept in {path} ({error.strerror or error})"
        raise InvalidInput(f"{why}; set {SECRET} to a text of at least {MIN_SECRET} bytes") from error
    return _read(path, own=True)


def connect(address: tuple[str, int], seconds: float, purpose: bytes, secret: bytes | None = None) -> socket.socket:
    """Return a connection, for a purpose, to a process that has proved the secret. secret: None for the address's.

    Raises:
        OSError: nothing listens there.
        InvalidInput: there is no secret.
        Broken: the other process did not prove the secret. If it ended connections early, this tried for some seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.create_connection(address, seconds)
        try:
            prove(connection, secret or secret_for(connection.getpeername()[0]), purpose, accepts=False)
            return connection
        except EndedEarly:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        except BaseException:
            connection.close()
            raise


def prove(connection: socket.socket, secret: bytes, purpose: bytes, accepts: bool) -> bytes:
    """Prove the secret to the other side of a connection, and check its proof. Return the connection's purpose, which
    both proofs contain. Raise Broken if the other side does not prove the secret within PROOF_SECONDS.

    Args:
        purpose: what the connection is for, at most PURPOSE_BYTES; on the side that accepts, how that must begin.
        accepts: whether this side has accepted the connection.
    """
    deadline, nonce = time.monotonic() + PROOF_SECONDS, secrets.token_bytes(NONCE_BYTES)

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            connection.settimeout(left)
            if not (part := connection.recv(count - len(data))):
                raise EndedEarly("it has ended")
            data += part
        return data

    try:
        connection.settimeout(PROOF_SECONDS)
        if not accepts:
            connection.sendall(OPENING + (purpose := purpose.ljust(PURPOSE_BYTES)) + nonce)
        if not (opening := read(len(OPENING) + PURPOSE_BYTES + NONCE_BYTES)).startswith(OPENING):
            raise Broken("it sends no messages of flexengine")
        heard, other = opening[len(OPENING) : -NONCE_BYTES], opening[-NONCE_BYTES:]
        if not heard.startswith(purpose):
            raise Broken(f"its connection is for {heard!r}, not for {purpose!r}")
        text = OPENING + heard + (other + nonce if accepts else nonce + other)
        proofs = [hmac.digest(secret, side + text, "sha256") for side in (b"connects", b"accepts")]
        connection.sendall(OPENING + heard + nonce if accepts else proofs[0])
        good = hmac.compare_digest(read(PROOF_BYTES), proofs[not accepts])
        if accepts:
            connection.sendall(proofs[1] if good else REFUSED)
        if not good:
            raise WrongSecret(f"it has another secret; {REMEDY}")
        return heard.rstrip()
    except TimeoutError as error:
        raise Broken(f"it did not prove the secret within {PROOF_SECONDS:g} s") from error
    except OSError as error:
        raise EndedEarly(f"its connection broke ({error.strerror or error})") from error
