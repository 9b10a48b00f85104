"""Opening of inputs: compressed files, streams, and files that are no text. Judged by the libraries that compress, and
by what a shell passes."""

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest

from flexengine.errors import InvalidInput
from flexengine.job import read_json
from flexengine.job.inputs import FORMATS, InputRows
from tests.helpers.inputs import arrow_file, written


def packed(data: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.compress(data)
    try:
        from compression import zstd
    except ImportError:
        zstd = pytest.importorskip("backports.zstd")
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})  # as the zstd command does


def lines(count: int) -> bytes:
    rng = random.Random(3)
    return b"".join(b'{"prompt": "%d %x"}\n' % (i, rng.getrandbits(900)) for i in range(count))


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.tsv", "in.json"])
def test_compressed_text_is_the_text(tmp_path, name, packing):
    data = b"prompt\n" + b'"hello, 1"\n' * 3 if name[-3:] in ("csv", "tsv") else lines(50)
    plain = InputRows(written(tmp_path, data, name))
    compressed = InputRows(written(tmp_path, packed(data, packing), name + packing))
    assert list(compressed) == list(plain) == list(compressed)
    assert len(list(plain)) in (3, 50)
    assert compressed.scan().sha256 == plain.scan().sha256 == hashlib.sha256(data).hexdigest()
    assert compressed.form == plain.form


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_several_members_follow_one_another(tmp_path, packing):
    data = packed(lines(3), packing) + packed(lines(2), packing)
    assert len(list(InputRows(written(tmp_path, data, "in.jsonl" + packing)))) == 5


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_an_archive_cut_short_is_refused_with_its_last_line(tmp_path, packing):
    data = packed(lines(5000), packing)
    cut = data[: len(data) // 2]
    rows = InputRows(written(tmp_path, cut, "in.jsonl" + packing))
    read: list[object] = []
    with pytest.raises(InvalidInput, match=r"is damaged after line \d+: it is cut short") as refused:
        read.extend(rows)
    line = int(str(refused.value).split("after line ")[1].split(":")[0])
    assert line == len(read) > 2000
    if packing == ".gz":
        assert line == zlib.decompressobj(31).decompress(cut).count(b"\n")
    with pytest.raises(InvalidInput, match="cut short"):
        rows.scan()


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_damage_anywhere_is_a_refusal_or_nothing(tmp_path, packing):
    data, rng = packed(lines(20), packing), random.Random(5)
    whole = list(InputRows(written(tmp_path, data, "in.jsonl" + packing)))
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.randrange(4, len(data))] ^= 1 << rng.randrange(8)
        try:
            assert list(InputRows(written(tmp_path, bytes(damaged), "in.jsonl" + packing))) == whole  # a header's flag
        except InvalidInput as error:
            refused += "is damaged" in str(error)
    assert refused > 40


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_small_file_with_a_huge_line_takes_little_memory(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 10_000)
    data = b'{"prompt": "a"}\n' + b"x" * 40_000_000 + b'\n{"prompt": "b"}\n'
    path = written(tmp_path, packed(data, packing), "in.jsonl" + packing)
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    rows = list(InputRows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.error for row in rows] == [None, "line 2: is longer than 10.0 kB; divide it", None]
    assert peak < 8_000_000


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_names_and_contents_that_disagree(tmp_path):
    (tmp_path / "plain.jsonl").write_bytes(packed(lines(4), ".gz"))
    assert len(list(InputRows(tmp_path / "plain.jsonl"))) == 4  # the contents decide
    for name, data, words in (
        ("a.jsonl.gz", b'{"prompt": "a"}', "is no gzip file: it begins with 7b 22 70 72"),
        ("b.jsonl.gz", b"", "is no gzip file: it is empty"),
        ("c.jsonl.zst", packed(b"x", ".gz"), "is no zstd file: it begins with 1f 8b"),
        ("d.gz", packed(b"x", ".gz"), r"no suffix before \.gz; accepted are .*--input-format"),
        ("e.tar.gz", packed(b"x", ".gz"), r"suffix '\.tar'"),
        ("f.jsonl.bz2", b"BZh9", r"decompress it first \(bunzip2 -k "),
        ("g.jsonl.xz", b"", r"decompress it first \(unxz -k "),
        ("h.jsonl", b"BZh91AY&SY1234", "compressed with bzip2"),
        ("i.csv", b"PK\x03\x04xxxx", "a spreadsheet or a ZIP archive; save the sheet as CSV"),
        ("l.jsonl.gz", packed(packed(b"x", ".gz"), ".gz"), "is compressed twice; decompress it once"),
        ("m.jsonl", b"\x04\x22\x4d\x18", "is compressed with lz4; decompress it first"),
        *((f"n.{end}", POINTER, "is a Git LFS pointer, not the file") for end in ("jsonl", "txt", "csv.gz", "parquet")),
        ("j.xlsx", b"", "is a spreadsheet.*save the sheet as CSV"),
        ("k.jsonl", b"PAR1\x15\x04", "a Parquet file; give --input-format parquet .input_format='parquet' in Python"),
    ):
        with pytest.raises(InvalidInput, match=words):
            InputRows(written(tmp_path, data, name))


def test_without_a_library_for_zstd_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = written(tmp_path, packed(lines(2), ".zst"), "in.jsonl.zst")
    for module in ("compression.zstd", "backports.zstd", "compression"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidInput, match=r'pip install "flexengine\[zst\]"'):
        InputRows(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["in a.jsonl", "in a.csv", "in a.txt"])
def test_utf_16_is_one_refusal_with_a_command_that_helps(tmp_path, encoding, name):
    text = "prompt\nhello\n" if name.endswith("csv") else '{"prompt": "hello"}\n'
    path = written(tmp_path, text.encode(encoding), name)
    with pytest.raises(InvalidInput, match=r"is encoded in UTF-16") as refused:
        InputRows(path)
    command = str(refused.value).split("convert it with ")[1]
    if encoding == "utf-16":
        subprocess.run(command, shell=True, check=True, timeout=60)
        made = tmp_path / f"utf8-{name}"
        assert made.read_bytes().decode("utf-8-sig") == text
        assert len(list(InputRows(made))) == 1


@pytest.mark.parametrize(
    ("name", "text"), [("in.txt", b"a b\rc\r"), ("in.jsonl", b'{"prompt": "a"}\r{"prompt": "b"}\r')]
)
def test_lines_that_end_with_cr_alone_are_one_refusal_with_a_command_that_helps(tmp_path, name, text):
    with pytest.raises(InvalidInput, match=r"ends lines with a carriage return \(CR\) alone") as refused:
        InputRows(written(tmp_path, text, name))
    subprocess.run(str(refused.value).split("convert it with ")[1], shell=True, check=True, timeout=60)
    assert len(list(InputRows(tmp_path / f"lf-{name}"))) == 2


@pytest.mark.parametrize(("name", "text", "count"), [
    ("in.txt", b"a\rb\nc\n", 2), ("in.txt", b"a\r", 1), ("in.jsonl", b'{\r"prompt": "a"\r}\r', 1),
    ("in.jsonl", b'[\r{"prompt": "a"},\r{"prompt": "b"}\r]', 2),
])  # fmt: skip
def test_carriage_returns_within_rows_and_json(tmp_path, name, text, count):
    assert len([row for row in InputRows(written(tmp_path, text, name)) if row.error is None]) == count


@pytest.mark.parametrize(("line", "words"), [
    (b'{"prompt": "a"},', "a comma after the object (remove it) at character 16"),
    (b'{"prompt": "a"}{"prompt": "b"}', "a second object (give each its own line) at character 16"),
])  # fmt: skip
def test_what_follows_an_object_is_named(tmp_path, line, words):
    (row,) = InputRows(written(tmp_path, line + b"\n", "in.jsonl"))
    assert words in row.error


def test_utf_32_and_packed_utf_16(tmp_path):
    with pytest.raises(InvalidInput, match=r"is encoded in UTF-32.*iconv -f UTF-32 -t UTF-8"):
        InputRows(written(tmp_path, "prompt\nhello\n".encode("utf-32"), "in.csv"))
    with pytest.raises(InvalidInput, match=r"decompress it, and convert it with iconv -f UTF-16 -t UTF-8$"):
        InputRows(written(tmp_path, packed("prompt\nhello\n".encode("utf-16"), ".gz"), "in.csv.gz"))


def test_a_zstd_file_may_begin_with_a_skippable_frame(tmp_path):
    """As parallel compressors write it."""
    frame = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    with InputRows(written(tmp_path, frame + packed(b'{"prompt": "a"}\n', ".zst"), "in.jsonl.zst")) as rows:
        assert [row.fields for row in rows] == [{"prompt": "a"}]


def test_the_number_of_a_closed_copy_is_not_used(tmp_path):
    """Another file may have it by then."""
    path = written(tmp_path, b'{"prompt": "a"}\n', "in.jsonl")
    with path.open("rb") as file, InputRows(f"/dev/fd/{file.fileno()}") as rows:
        assert rows.size == path.stat().st_size
    with path.open("rb"):
        assert rows.size == 0


def test_text_with_zeros_is_not_taken_for_utf_16(tmp_path):
    assert len(list(InputRows(written(tmp_path, b"a\0", "in.txt")))) == 1
    assert len(list(InputRows(written(tmp_path, b"a\0b\0\0c\n", "in.txt")))) == 1


# Formats by option


def test_the_format_may_be_given(tmp_path):
    path = written(tmp_path, b"prompt\tid\nhello\t1\n", "some.data")
    (row,) = InputRows(path, form="tsv")
    assert row.fields == {"prompt": "hello", "id": "1"}
    assert [row.fields["prompt"] for row in InputRows(path, form="txt")] == ["prompt\tid", "hello\t1"]
    with pytest.raises(InvalidInput, match=f"must be one of {', '.join(FORMATS)}"):
        InputRows(path, form="xml")
    (tmp_path / "x.csv").write_bytes(b'{"prompt": "a"}\n')
    assert InputRows(tmp_path / "x.csv", form="jsonl").form == "jsonl"


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_tables_without_a_suffix(tmp_path, form):
    pa = pytest.importorskip("pyarrow")
    path = arrow_file(tmp_path / f"t.{form}", pa.table({"prompt": ["a", "b"]}))
    bare = path.rename(tmp_path / "bare")
    assert [row.fields["prompt"] for row in InputRows(bare, form=form)] == ["a", "b"]
    with pytest.raises(InvalidInput, match=r"compressed \.\w+ file.*gunzip -k"):
        InputRows(written(tmp_path, gzip.compress(bare.read_bytes()), f"t.{form}.gz"))


# Streams


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_an_open_pipe_is_read_once(tmp_path, packing):
    """As bash passes <(...): /dev/fd/N."""
    data = lines(30)
    reading, writing = os.pipe()
    sent = packed(data, packing) if packing else data

    def write() -> None:
        with open(writing, "wb") as file:
            file.write(sent)

    writer = threading.Thread(target=write)
    writer.start()
    with InputRows(f"/dev/fd/{reading}") as rows:
        writer.join()
        assert [json.loads(line) for line in data.splitlines()] == [row.fields for row in rows]
        assert list(rows) == list(rows)
    os.close(reading)


def test_an_open_file_is_read_from_its_position(tmp_path):
    path = written(tmp_path, b"skipped\nprompt,x\nhello,1\n", "any")
    with path.open("rb", buffering=0) as file:
        file.seek(8)
        with InputRows(f"/dev/fd/{file.fileno()}", form="csv") as rows:
            assert [row.fields for row in rows] == [{"prompt": "hello", "x": "1"}]


def test_bash_passes_pipes(tmp_path):
    code = "import sys; from flexengine.job.inputs import InputRows; rows = InputRows(sys.argv[1], form=sys.argv[2])\n"
    code += "print([[row.fields['prompt'] for row in rows] for _ in range(2)])"
    script = f"{sys.executable} -c \"$CODE\" <(printf 'prompt\\na\\nb\\n' | gzip) csv"
    done = subprocess.run(["bash", "-c", script], env={**os.environ, "CODE": code}, capture_output=True, timeout=120)
    assert done.stdout.decode().strip() == "[['a', 'b'], ['a', 'b']]", done.stderr


def test_a_full_temporary_directory_is_named(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        name = "x"

        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    with pytest.raises(InvalidInput, match=rf"the disk of {tmp_path} is full: [\d.]+ [kMGT]?B are free.*set TMPDIR"):
        InputRows("/dev/fd/" + str(os.open(written(tmp_path, b"{}"), os.O_RDONLY)))


def test_a_pattern_in_quotes_is_answered_as_one(tmp_path):
    written(tmp_path, b"", "part-results.jsonl")
    with pytest.raises(InvalidInput, match=r"a job has one input, and this is a pattern .*: leave the quotes out$"):
        InputRows(tmp_path / "part-*.jsonl")


def test_a_file_with_a_similar_name_is_suggested(tmp_path):
    written(tmp_path, b"", "prompts.jsonl")
    with pytest.raises(InvalidInput, match=rf"No such file.*; did you mean {tmp_path}/prompts\.jsonl\?"):
        InputRows(tmp_path / "prompt.jsonl")
    with pytest.raises(InvalidInput, match=r"No such file.*; give a file"):
        InputRows(tmp_path / "zzz.csv")
    with pytest.raises(InvalidInput, match="No such file"):
        InputRows(Path("/nowhere/at all/x.jsonl"))
