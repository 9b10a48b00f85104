"""The table of formats in docs/models.md: all of the registry, with what the doors of kernels say now."""

from pathlib import Path

import pytest

from tests.helpers.form_table import PAGE, form_rows, listed, missing, page_rows, table, with_table


def test_the_page_has_every_format_with_its_bits_and_kernels() -> None:
    """If this fails after a change of kernels, run python -m tests.helpers.form_table --kernels."""
    page = PAGE.read_text(encoding="utf-8")
    rows = page_rows(page)
    assert not missing(rows)
    assert listed(table(rows)) == listed(page)
    assert {row.verdict for row in rows} == {"exact", "-"}
    assert with_table(page, rows) == page


def test_doors_are_asked() -> None:
    cells = {row.name: row.cells[1:] for row in page_rows(PAGE.read_text(encoding="utf-8"))}
    assert cells["int4"] == ("4.5", "`--weights`", "-", "native", "Triton")
    assert cells["q4_k"][:4] == ("4.5", "GGUF", "exact", "native")


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.filterwarnings("ignore")
def test_every_format_is_read_and_exact(tmp_path: Path) -> None:
    found = {row.name: row.verdict for row in form_rows(tmp_path)}
    assert found == {row.name: row.verdict for row in page_rows(PAGE.read_text(encoding="utf-8"))}
