"""Records of neurons: where each vector lies, what it decodes to, and which forms are refused."""

import pytest
import torch

from flexengine.codec.records import ALIGN, CODED, PLAIN, RecordForm
from flexengine.errors import InvalidInput


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "width", "gated", "vector", "record"), [
    ("float32", 64, False, 256, 512), ("float32", 65, False, 260, 1024), ("bfloat16", 4096, False, 8192, 16384),
    ("float16", 4096, True, 8192, 24576), ("float16", 1, True, 2, 512),
    # codes, and 4 bytes per group of 64 (int8) or 32 (int4)
    ("int8", 4096, False, 4096 + 256, 8704), ("int4", 4096, False, 2048 + 512, 5120), ("int4", 4096, True, 2560, 7680),
    ("int8", 40, False, 40 + 5 * 4, 512), ("int4", 80, True, 40 + 5 * 4, 512),
])  # fmt: skip
def test_sizes(kind: str, width: int, gated: bool, vector: int, record: int) -> None:
    form = RecordForm(kind, width, gated)
    assert (form.vector_bytes, form.nbytes, form.nbytes % ALIGN) == (vector, record, 0)
    assert (form.vectors, form.down) == ((3, 2) if gated else (2, 1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_vectors_lie_side_by_side(kind: str, gated: bool) -> None:
    form, dtype = RecordForm(kind, 70, gated), PLAIN[kind]
    matrices = [x.to(dtype) for x in torch.randn(form.vectors, 9, 70)]
    records = form.encode(*matrices)
    assert records.shape == (9, form.nbytes)
    for i in range(9):
        expected = b"".join(matrix[i].view(torch.uint8).numpy().tobytes() for matrix in matrices)
        assert records[i].numpy().tobytes() == expected.ljust(form.nbytes, b"\0")
    for index, matrix in enumerate(matrices):
        assert torch.equal(form.decode(records, index), matrix.float())


@pytest.mark.parametrize("kind", PLAIN)
def test_wider_numbers_are_rounded(kind: str) -> None:
    form, x = RecordForm(kind, 64), torch.randn(2, 5, 64)
    assert torch.equal(form.decode(form.encode(*x), 1), x[1].to(PLAIN[kind]).float())


@pytest.mark.parametrize("width", [8, 40, 96, 128, 320])
@pytest.mark.parametrize("kind", CODED)
def test_codes_scales_and_minima_of_a_vector(kind: str, width: int) -> None:
    """Every element by hand from the bytes, as codec.cache describes a panel of one token."""
    form, bits = RecordForm(kind, width, gated=True), CODED[kind]
    group = next(g for g in (64, 32, 16, 8) if width % g == 0 and g <= (64 if bits == 8 else 32))
    matrices = torch.randn(3, 4, width)
    records = form.encode(*matrices)
    for index, i in ((0, 3), (1, 0), (2, 2)):
        data = records[i, index * form.vector_bytes :][: form.vector_bytes].clone()
        scale, minimum = data[width * bits // 8 :].view(torch.float16).float().view(2, -1)
        stride, values = group * bits // 8, []
        for d in range(width):
            g, place = divmod(d, group)
            code = int(data[g * stride + place % stride]) >> place // stride * bits & 2**bits - 1
            values.append(float(minimum[g]) + code * float(scale[g]))
        found = form.decode(records, index)[i]
        torch.testing.assert_close(found, torch.tensor(values))
        step = scale.repeat_interleave(group)
        assert bool(((found - matrices[index, i]).abs() <= (0.51 if bits == 8 else 3) * step + 1e-3).all())


@pytest.mark.parametrize("kind", [*PLAIN, *CODED])
def test_a_record_depends_on_its_neuron_only(kind: str) -> None:
    form, x = RecordForm(kind, 64), torch.randn(2, 6, 64)
    records = form.encode(*x)
    assert torch.equal(form.encode(*x[:, 4:5]), records[4:5])
    assert torch.equal(form.decode(records[[5, 1]], 1), form.decode(records, 1)[[5, 1]])


@pytest.mark.parametrize(("kind", "width", "named"), [
    ("int2", 64, "float32, float16, bfloat16, int8, int4"), ("float64", 64, "float64"), ("bfloat16", 0, "0 bfloat16"),
    ("int8", 60, "60 int8"), ("int4", 4, "multiple of 8"), ("int4", 0, "0 int4"),
])  # fmt: skip
def test_what_is_refused(kind: str, width: int, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        RecordForm(kind, width)
