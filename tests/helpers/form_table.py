"""The formats of weights as docs/models.md lists them: each is read from a tiny file, and its tokens are compared.

python -m tests.helpers.form_table            write the table into docs/models.md, without walking the architectures
python -m tests.helpers.form_table --kernels  only with the present bits and kernels of the formats that it has
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from flexengine.codec.by_inputs import ByInputs
from flexengine.codec.forms import FAMILIES, FORMS, Form, make_form
from flexengine.codec.gguf_blocks import BLOCKS
from flexengine.codec.scaled import Scaled
from flexengine.errors import format_words
from flexengine.kernels.base import kernels_of
from flexengine.lossy import WEIGHTS
from flexengine.worker.open_model import open_model
from tests.helpers.families import prompts_of, reference
from tests.helpers.quantised import fp8, gptq
from tests.helpers.tiny_gguf import gguf_of_type

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TITLE = "## Formats of weights"
SIZES = 4096, 4096  # of the matrix that the columns of bits and kernels are about
ABOUT = f"""\
{TITLE}

Made by the same command, or alone by `python -m tests.helpers.form_table`: a tiny model in each format is read as it
is published, and its greedy tokens are compared with those of `transformers` on the decoded fp32 model. Bits per weight
and kernels are those of a matrix of 4096 x 4096. Formats of `--weights` are made here.

| format | bits | read from | tokens | CPU kernel | GPU kernel |
|---|---|---|---|---|---|
"""
# Schemes besides those of tests/model/quantised/test_tokens.py, for formats that these have not.
MORE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gptq 2": ("llama", {"quant_method": "gptq", "bits": 2, "group_size": 16, "sym": False},
               lambda n, x: gptq(x, 2, 16)),
    "gptq 3": ("llama", {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": False},
               lambda n, x: None if x.shape[0] % 32 or x.shape[1] % 32 else gptq(x, 3, 32)),
    "mxfp8": ("llama", {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"all": {
        "targets": ["Linear"],
        "weights": {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}}}},
        lambda n, x: fp8(x, (1, 32), torch.float8_e8m0fnu, "weight_scale")),
}  # fmt: skip
RAGGED = ("fp8 blocks", "fp8 blocks, head", "fp8 latent")  # schemes whose blocks no published model has


class FormRow(NamedTuple):
    """One format."""

    name: str
    source: str  # file that has it
    verdict: str  # of the comparison of tokens; "-" for formats that are made here

    @property
    def form(self) -> Form:
        return make_form(self.name, *SIZES)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        form = self.form
        bits = f"{8 * form.nbytes / (form.rows * form.columns):.3g}"
        cpu = "native" if form.in_steps and kernels_of(type(form), "cpu") is not None else "torch"
        gpu = "Triton" if kernels_of(type(form), "cuda") is not None and _in_triton(form) else "torch"
        return format_words(self.name), bits, self.source, self.verdict, cpu, gpu


def _in_triton(form: Form) -> bool:
    """Whether Triton's kernels read a format that is of a class with such kernels."""
    if not isinstance(form, Scaled | ByInputs):
        return True
    matrix_of = resolve_name("flexengine.kernels.triton_parts:matrix_of")
    return matrix_of(torch.zeros(form.nbytes, dtype=torch.uint8), form) is not None


def form_rows(folder: Path) -> Iterator[FormRow]:
    """Yield every format of the registry, and of its families those that tiny checkpoints have. folder: an empty one,
    for these."""
    yield from (FormRow(name, "`--weights`", "-") for name in WEIGHTS)
    for kind in BLOCKS:
        path, model = gguf_of_type(folder / f"{kind}.gguf", kind)
        yield FormRow(kind, "GGUF", _verdict(path, model, 96))
    from tests.model.quantised.test_tokens import SCHEMES, gpt_oss, quantised

    SCHEMES.update(MORE)
    found: dict[str, FormRow] = {}
    for number, scheme in enumerate([*SCHEMES, "mxfp4"]):
        if scheme in RAGGED:
            continue
        own = folder / str(number)
        path, model = gpt_oss(own) if scheme == "mxfp4" else quantised(own, scheme)
        method = SCHEMES[scheme][1]["quant_method"] if scheme in SCHEMES else scheme
        verdict = _verdict(path, model, 601)
        for name in {form.packed.name for form in open_model(str(path), None, "cpu").stored_forms.values()} - {*found}:
            found[name] = FormRow(name, method, verdict)
    yield from (found[name] for name in sorted(found, key=lambda name: ([*FAMILIES].index(name.split("-")[0]), name)))


def _verdict(path: Path, model: Any, vocabulary: int) -> str:
    from flexengine import Engine, SamplingParams

    prompts = prompts_of(vocabulary, (5, 17, 1, 9))
    with Engine(str(path), device="cpu") as engine:
        rows = [{"prompt_token_ids": ids} for ids in prompts]
        results = engine.generate(rows, SamplingParams(max_tokens=6, ignore_eos=True))
    return "exact" if [result.token_ids for result in results] == reference(model, prompts, 6) else "wrong"


def table(rows: list[FormRow]) -> str:
    """Return the section of docs/models.md."""
    return ABOUT + "".join(f"| {' | '.join(row.cells)} |\n" for row in rows)


def listed(page: str) -> dict[str, tuple[str, ...]]:
    """Return the rows of the section of a docs/models.md, by format."""
    section = page.partition(TITLE)[2]
    cells = [tuple(line.strip("| ").split(" | ")) for line in re.findall(r"^\| .* \|$", section, re.M)[1:]]
    return {row[0]: row for row in cells}


def missing(rows: list[FormRow]) -> set[str]:
    """Return what the registry has, and no row."""
    names = {row.name for row in rows}
    return ({*FORMS} | {*FAMILIES}) - names - {name.split("-")[0] for name in names if "-" in name}


def with_table(page: str, rows: list[FormRow]) -> str:
    """Return a docs/models.md with this table in place of its own."""
    return page.partition(TITLE)[0].rstrip("\n") + "\n\n" + table(rows)


def page_rows(page: str) -> list[FormRow]:
    """Return the formats that a docs/models.md has."""
    rows = listed(page).values()
    return [FormRow(cells[0].lower().replace(" ", "-"), *cells[2:4]) for cells in rows]


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        rows = page_rows(page) if arguments == ["--kernels"] else [*form_rows(Path(folder))]
    PAGE.write_text(with_table(page, rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
