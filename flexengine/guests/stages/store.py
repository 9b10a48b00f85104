"""The driver's address in the store of torchrun's own process. Every program that reaches the store can read and write
it, so the address has a proof of the secret. torch reads a value whole before it is checked here."""

import hmac
import json
import os
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from flexengine.guests.wire.secret import WrongSecret

PLACE_PROOF_BYTES = 64  # before the address
MOST_ANNOUNCED = 1024  # bytes of both
STORE_SECONDS = 20.0  # without an answer of the store, until it counts as lost


def announced(secret: bytes, host: str, port: int) -> str:
    """Return the driver's address in this start as it stands in the store of torchrun: after a proof of the secret."""
    place = json.dumps([host, port]).encode()
    return (_place_proof(secret, place) + place).decode()


def _place_proof(secret: bytes, place: bytes) -> bytes:
    start = f"driver {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} ".encode()
    return hmac.digest(secret, start + place, "sha256").hex().encode()


def driver_address(secret: bytes, told: bytes) -> tuple[str, int]:
    """Return the address that was announced. Raise WrongSecret if it was announced with another secret. The proof is
    checked before anything is parsed."""
    proof, place = told[:PLACE_PROOF_BYTES], told[PLACE_PROOF_BYTES:MOST_ANNOUNCED]
    if len(told) > MOST_ANNOUNCED or not hmac.compare_digest(proof, _place_proof(secret, place)):
        raise WrongSecret("stage 0's address in torchrun's store has the proof of another secret; give all stages one")
    host, port = json.loads(place)
    return host, port


def agent_store() -> PrefixStore | None:
    """Return the store of torchrun's own process, which names the driver's address. None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    whole = TCPStore(host, port, None, False, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
    return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", whole)
