"""Tokens that a decode step stores in RAM: their rows and not a byte more, in every form of the cache."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from flexengine.codec.cache import CacheFormat
from flexengine.tier.base import Ledger, Region
from flexengine.tier.machine import make_machine
from flexengine.tier.memory import MemoryTier
from flexengine.worker.cache.tables import PageShape, rows_of, store_rows
from flexengine.worker.regions import pick_rows

KV_HEADS, PAGE_TOKENS = 3, 16
TOKENS = [(5, 0, 3), (1, 1, 15), (4, 2, 0)]  # page in the pool, page in the buffer, place in the page


def _by_token(pages: torch.Tensor, form: CacheFormat | None, dim: int) -> list[torch.Tensor]:
    """Views of pages as whole numbers whose last dimension but one is the token's place in its page."""
    if form is None:
        return [pages.view(torch.int32).view(-1, 2, KV_HEADS, PAGE_TOKENS, dim)]
    codes, *halves = form.panels(pages)
    return [codes, *(half.view(torch.int16).transpose(-1, -2) for half in halves)]


@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("bits", [0, 8, 4, 2])
def test_only_the_tokens_rows_are_written(tmp_path: Path, bits: int, dim: int) -> None:
    form = CacheFormat(bits, KV_HEADS, PAGE_TOKENS, dim) if bits else None
    page_bytes = form.page_bytes if form else 2 * KV_HEADS * PAGE_TOKENS * dim * 4
    token_bytes = page_bytes // PAGE_TOKENS
    machine = make_machine("sim", None, None, [tmp_path])
    source = torch.randint(1, 255, (3, page_bytes), dtype=torch.uint8)
    target = torch.zeros(7, page_bytes, dtype=torch.uint8)
    buffer, pool = (Region(x.view(-1), 0, x.nbytes, torch.uint8) for x in (source, target))

    for rows in rows_of(PageShape.of(form, KV_HEADS, PAGE_TOKENS, dim * 4), TOKENS, torch.device("cpu")):
        store_rows(machine, rows, buffer, pool, "host")

    assert machine.host.bytes_written == len(TOKENS) * token_bytes
    for here, there in zip(*(_by_token(x, form, dim) for x in (source, target)), strict=True):
        for far, near, place in TOKENS:
            assert torch.equal(there[..., place, :][far], here[..., place, :][near])
            there[..., place, :][far] = 0
    assert not target.any()


def test_put_counts_and_refuses_what_cannot_be_addressed(tmp_path: Path) -> None:
    tier = MemoryTier("host", Ledger("host"))
    home = tier.allocate(70, "rows")  # the last 6 bytes are no whole row
    tier.view(home).zero_()
    tier.put(torch.tensor([[7, 8], [5, 6]]), home, torch.tensor([3, 1]))
    assert tier.view(home)[:64].view(torch.int64).tolist() == [0, 0, 5, 6, 0, 0, 7, 8]
    assert tier.bytes_written == 32
    disk = make_machine("cpu", None, None, [tmp_path]).disk
    with pytest.raises(TypeError, match="cannot be addressed"):
        disk.put(torch.zeros(1, 2), disk.allocate(4096, "rows"), torch.tensor([0]))
    disk.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("lengths", [[40], [7, 0, 1, 20, 12], [7, 20.5, 12.5]])
def test_rows_of_a_matrix_in_pieces(tmp_path: Path, tier: str, lengths: list[float]) -> None:
    """Of whole rows, or cut anywhere: rows with some numbers, in the dtype that is asked for."""
    matrix, width = torch.randn(40, 6), 6
    with closing(make_machine("sim", None, None, [tmp_path])) as machine:
        kept = machine.tier(tier)
        pieces = [kept.allocate(int(n * width * 4), "rows", torch.float32) for n in lengths]
        for piece, part in zip(pieces, matrix.view(-1).split([int(n * width) for n in lengths]), strict=True):
            if len(part):
                kept.store(part.contiguous(), piece)
        for numbers in ([0], [6, 7, 8], [39], [1, 2, 9, 27, 28, 30], list(range(40)), list(range(7, 8))):
            before = kept.bytes_read
            assert torch.equal(pick_rows(kept, pieces, numbers, width, torch.float32), matrix[numbers])
            assert kept.bytes_read - before == len(numbers) * width * 4


def test_each_piece_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table in many files are found without a walk through all files for each row."""
    with closing(make_machine("sim", None, None, [tmp_path])) as machine:
        pieces = [machine.host.allocate(64, "rows", torch.float32) for _ in range(100)]
        monkeypatch.setattr("flexengine.worker.regions.part_of", lambda *_: pytest.fail("a walk"))
        calls, pick = list[Region](), machine.host.pick
        monkeypatch.setattr(machine.host, "pick", lambda region, *rest: (calls.append(region), pick(region, *rest)))
        pick_rows(machine.host, pieces, list(range(0, 400, 2)), 4, torch.float32)
    assert list(map(id, calls)) == list(map(id, pieces))
