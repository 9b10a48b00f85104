"""Damaged Parquet and Arrow files are refused; no row is lost or invented."""

import random
import subprocess

import pytest

from flexengine.errors import FlexError, InvalidInput
from flexengine.job.inputs import InputRows
from tests.helpers.inputs import arrow_file, written
from tests.job.test_tables import here_replies, repeated_text


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_tables(tmp_path, suffix):
    pa = pytest.importorskip("pyarrow")
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdefgh ", k=50)) for _ in range(2000)]
    whole = arrow_file(tmp_path / f"t{suffix}", pa.table({"prompt": texts})).read_bytes()
    for cut in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        with pytest.raises(Exception, match=r"."):
            next(here_replies(written(tmp_path, whole[:cut], f"cut{suffix}")))
    with pytest.raises(InvalidInput, match=suffix):
        InputRows(written(tmp_path, b"", f"empty{suffix}"))
    middle = whole[: len(whole) // 2] + bytes(2000) + whole[len(whole) // 2 + 2000 :]
    try:
        found = f"{len(list(InputRows(written(tmp_path, middle, f'hole{suffix}'))))} rows"
    except InvalidInput as error:
        found = str(error)
    assert found == "2000 rows" or "is damaged after row" in found  # pyarrow need not notice that values changed


def test_offsets_beyond_the_data_are_damage(tmp_path):
    pa, np = pytest.importorskip("pyarrow"), pytest.importorskip("numpy")
    data = arrow_file(tmp_path / "t.arrow", pa.table({"prompt": ["abcdefgh"] * 4})).read_bytes()
    right, wrong = (np.array([0, 8, x, 24, 32], np.int32).tobytes() for x in (16, 2**30))
    with pytest.raises(InvalidInput, match="is damaged after row 0"):
        list(InputRows(written(tmp_path, data.replace(right, wrong), "u.arrow")))


def arrow_bytes(tmp_path, new, packing, count=3):
    """Return the bytes of an Arrow file of batches of 300 rows, and where its messages of rows end."""
    pa = pytest.importorskip("pyarrow")
    texts = [f"{i * 7919 % 9973}" for i in range(300 * count)]
    path, ends = tmp_path / "whole.arrow", []
    table, options = pa.table({"prompt": texts}), pa.ipc.IpcWriteOptions(compression=packing)
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=options) as writer:
        for batch in table.to_batches(max_chunksize=300):
            writer.write_batch(batch)
            ends.append(sink.tell())
    return path.read_bytes(), ends


@pytest.mark.parametrize("packing", [None, "zstd"])
def test_a_damaged_arrow_file_is_refused_not_shortened(tmp_path, packing):
    pa = pytest.importorskip("pyarrow")
    data, ends = arrow_bytes(tmp_path, pa.ipc.new_stream, packing)
    with pytest.raises(InvalidInput, match="is damaged after row 600"):
        list(InputRows(written(tmp_path, data[: ends[2] - 50], "cut.arrow")))
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        data, ends = arrow_bytes(tmp_path, new, packing)
        for damage in (b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 60):
            broken = data[: ends[0]] + damage + data[ends[0] + len(damage) :]
            with pytest.raises(InvalidInput, match="is damaged after row 300"):
                list(InputRows(written(tmp_path, broken, "damaged.arrow")))


@pytest.mark.parametrize("new", ["new_file", "new_stream"])
def test_a_message_of_negative_size_is_damage(tmp_path, new):
    pa = pytest.importorskip("pyarrow")
    data, ends = arrow_bytes(tmp_path, getattr(pa.ipc, new), None)
    reader, sizes = pa.ipc.MessageReader.open_stream(pa.BufferReader(data[8 if new == "new_file" else 0 :])), []
    sizes = [reader.read_next_message().body.size for _ in range(4)]
    place = data.index(sizes[2].to_bytes(8, "little"), ends[0])
    assert place < ends[1]
    for size in (-1, -sizes[2], -(ends[0] + 64), -(2**63)):
        broken = data[:place] + size.to_bytes(8, "little", signed=True) + data[place + 8 :]
        with pytest.raises(InvalidInput, match="is damaged after row 300"):
            list(InputRows(written(tmp_path, broken, "negative.arrow")))


def claimed(pq, path, old, new):
    """Replace a number of rows in the footer of a Parquet file, which varints of zigzag hold."""
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8].replace(varint(2 * old), varint(2 * new))
    path.write_bytes(data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.slow
def test_rows_that_are_only_claimed_are_not_made(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    count = 12_345
    # All numbers of the file are changed, also those of the column; pages say otherwise.
    pq.write_table(repeated_text(pa, count, 2**27), path, compression="zstd", store_schema=False)
    claimed(pq, path, count, 2**62)
    assert pq.ParquetFile(path).metadata.row_group(0).num_rows == 2**62
    with pytest.raises(InvalidInput, match="row group or batch 0 claims 4,611,686,018,427,387,904 rows"):
        list(InputRows(path, memory=1))
    pq.write_table(pa.table({"prompt": ["a"] * count}), path, store_schema=False)
    claimed(pq, path, count, count + 1)
    with pytest.raises(InvalidInput, match="is damaged after row"):
        list(InputRows(path))


@pytest.mark.parametrize(("program", "said"), [
    ("import flexengine.job.none", "cannot be read: the process that reads it ended with exit status 1: Module"),
    ("raise MemoryError('odd')", r"cannot be read as \.parquet: it takes too much memory .*\(exit status 1\)$"),
    ("exit(5)", r"cannot be read as \.parquet: it takes too much memory .*\(exit status 5\)$"),
])  # fmt: skip
def test_a_process_that_ends_at_once(tmp_path, monkeypatch, program, said):
    path = arrow_file(tmp_path / "t.parquet", pytest.importorskip("pyarrow").table({"prompt": ["a"]}))
    instead_of_reading(monkeypatch, program)
    with pytest.raises(FlexError, match=rf"^input .*t\.parquet {said}"):
        InputRows(path)


def test_an_error_of_the_process_is_no_damage(tmp_path, monkeypatch):
    """It ends the process that continues after one that a limit ended."""
    path = arrow_file(tmp_path / "t.parquet", pytest.importorskip("pyarrow").table({"prompt": ["a"] * 300}))
    program = (
        "import os, pickle, sys\nfrom flexengine.job import table_process as p\nplain = p.replies\n"
        "if pickle.loads(bytes.fromhex(sys.argv[2]))[3]: raise RuntimeError('odd')\n"
        "def replies(*args):\n"
        "    for reply in plain(*args):\n"
        "        if reply[0] == 'rows' and reply[1][0].line > 256: os.abort()\n"
        "        yield reply\n"
        "p.replies = replies\np._serve(*sys.argv[1:])"
    )
    instead_of_reading(monkeypatch, program)
    rows = InputRows(path)
    with pytest.raises(
        FlexError, match=r"t\.parquet cannot be read: .* ended with exit status 1: RuntimeError: odd; mend"
    ):
        list(rows)


def instead_of_reading(monkeypatch, program):
    plain = subprocess.Popen
    changed = lambda words, **given: plain([words[0], "-c", program, *words[4:]], **given)  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", changed)
