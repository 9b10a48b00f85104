"""What calibration records is what hooks on transformers' own model see, and weights are encoded by it."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexengine import Engine, Lossy, Policy, texts
from flexengine.codec.packed import CODECS, Packed
from flexengine.errors import InvalidInput
from flexengine.guests import calibration
from flexengine.guests.calibration import ROWS, Calibration
from flexengine.lossy import BUNDLED, FITTED
from flexengine.model import encoding
from flexengine.model.encoding import FINE, PRIOR, ImportanceRecorder, Importances, exact_parts
from tests.helpers.calibrated import SPREAD, TOKENS
from tests.helpers.families import prompts_of
from tests.helpers.tokenizers import byte_tokenizer

# What is recorded.


def squares(model: Any, rows: list[list[int]]) -> dict[str, Any]:
    """By hooks: sums of squares of each linear layer's input columns, by parameter, and how many tokens there were."""
    found: dict[str, Any] = {}

    def note(name: str, x: torch.Tensor) -> None:
        x = x.double().reshape(-1, x.shape[-1])
        sums, tokens = found.get(name, (0, 0))
        found[name] = (sums + (x**2).sum(0), tokens + len(x))

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=f"{name}.weight": note(name, args[0]))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return found


def recorded(directory: Path, rows: list[list[int]], policy: Policy | None = None) -> dict[str, torch.Tensor]:
    with Engine(directory, policy=policy, device="sim") as engine:
        read = Calibration(tuple((*row, 5) for row in rows))  # the last token is only predicted
        return read.measure(engine.core, engine.score)


@pytest.mark.parametrize("family", ["opt", "llama-tied", "gpt2", "phi3"])
def test_importances_are_mean_squares_of_inputs(families: Any, family: str) -> None:
    known, rows = families(family), prompts_of(601)
    with Engine(known.directory, device="sim") as engine:
        skeleton = engine.core.skeleton
        wanted = {n for n in encoding.forms(skeleton, "int4") if any(n in s for s in skeleton.layers)}
    expected = squares(known.model, rows)
    for policy in (None, SPREAD):
        found = recorded(known.directory, rows, policy)
        assert set(found) >= wanted
        for name, columns in found.items():
            sums, tokens = expected[name]
            assert tokens == sum(map(len, rows))
            means = (sums + PRIOR * sums.mean() / tokens) / (tokens + PRIOR)
            assert torch.allclose(columns.double(), means, rtol=1e-4, atol=0), name


def test_sums_do_not_depend_on_the_order_of_tokens() -> None:
    """Sums in any order, in batches of any size and for any magnitudes equal the exact sum."""
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.randint(-5, 4, (64,), generator=generator)
    x = torch.randn(8192, 64, generator=generator) * scales
    found = []
    for size in (1000, 1000, 256, 7):
        order = torch.randperm(len(x), generator=generator)
        sums = torch.zeros(2, 64, dtype=torch.float64)
        for rows in torch.split(x[order], size):
            sums += torch.stack([part.sum(0) for part in exact_parts(rows.double().square())])
        found.append(sums.sum(0))
    assert all(torch.equal(found[0], other) for other in found)
    for column, total in zip(x.T.double().tolist(), found[0].tolist(), strict=True):
        exact = math.fsum(value * value for value in column)  # squares of fp32 numbers are exact in fp64
        assert abs(total - exact) <= 8192 * FINE / 2 + 2**-52 * exact


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_importances_of_experts(families: Any, family: str) -> None:
    """An expert's importances are those of the tokens that the router sends to it; an expert without tokens has
    none."""
    known, rows = families(family), prompts_of(601, (1,))
    seen: dict[str, torch.Tensor] = {}
    layers = known.model.model.layers
    for j, layer in enumerate(layers):

        def note(_: Any, args: Any, kwargs: Any, j: int = j) -> None:
            hidden, chosen = args[0].double().reshape(-1, 64), args[1]
            for expert in range(4):
                picked = hidden[(chosen == expert).any(-1)]
                seen[f"{j} {expert}"] = torch.cat([seen.get(f"{j} {expert}", picked[:0]), picked])

        layer.mlp.experts.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for row in rows:
            known.model(torch.tensor([row]))
    for layer in layers:
        layer.mlp.experts._forward_pre_hooks.clear()
    found = recorded(known.directory, rows)
    empty = 0
    for j in range(len(layers)):
        gates = found[f"model.layers.{j}.mlp.experts.gate_up_proj"]
        for expert, columns in enumerate(gates):
            x = seen[f"{j} {expert}"]
            sums = (x**2).sum(0)
            means = (sums + PRIOR * sums.mean() / max(1, len(x))) / (len(x) + PRIOR)
            assert torch.allclose(columns.double(), means, rtol=1e-4, atol=0)
            empty += not len(x)
            assert bool(columns.any()) == bool(len(x))
    assert empty


def test_nothing_is_left_behind(families: Any) -> None:
    with Engine(families("mixtral").directory, device="sim") as engine:
        before = {id(m): dict(m.__dict__) for m in engine.core.skeleton.model.modules()}
        with pytest.raises(KeyboardInterrupt), ImportanceRecorder(engine.core.skeleton).watching():
            raise KeyboardInterrupt
        for module in engine.core.skeleton.model.modules():
            assert module.__dict__ == before[id(module)]
            assert not module._forward_pre_hooks


# What is made of it.


def test_an_expert_without_tokens_is_encoded_as_without_calibration() -> None:
    columns = {"experts": torch.stack([torch.zeros(64), torch.rand(64)]), "one": torch.rand(64)}
    kept = Importances(columns, "")
    assert kept.of("experts", 0) is None
    assert torch.equal(kept.of("experts", 1), columns["experts"][1])  # type: ignore[arg-type]
    assert torch.equal(kept.of("one", 0), columns["one"])  # type: ignore[arg-type]
    assert kept.of("other", 0) is None


def decoded(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The encoded matrices of the layers, as products see them."""
    for name, form in engine.core.opened.forms.items():
        if not any(name in layer for layer in engine.core.skeleton.layers):
            continue
        origin = engine.core.opened.prepare_weights()[name]
        data = encoding.read_part(origin, 0, form.nbytes).view(max(1, form.count), -1)
        yield name, torch.stack([form.packed.dequantize(one) for one in data])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("codec", FITTED)
def test_weighted_errors_are_less(reader: Any, families: Any, family: str, codec: str) -> None:
    """Summed over all matrices, even for a random model, whose columns have similar inputs."""
    directory, made = reader(family), {}
    for calibrate in (None, BUNDLED):
        with Engine(directory, device="sim", lossy=Lossy(weights=codec, calibrate=calibrate)) as engine:
            engine.prepare()
            made[calibrate] = dict(decoded(engine))
            importances = engine.calibrator.importances
            forms = engine.core.opened.forms
    assert importances is not None
    exact = dict(families(family).model.named_parameters())
    errors = dict.fromkeys(made, 0.0)
    for calibrate, matrices in made.items():
        for name, matrix in matrices.items():
            own = exact[name].detach().reshape(len(matrix), *exact[name].shape[-2:])
            weights = importances.columns[name].view(len(matrix), 1, -1)
            own = own.transpose(1, 2) if forms[name].transposed else own
            errors[calibrate] += float(((matrix - own) ** 2 * weights).sum() / ((own**2) * weights).sum())
    assert errors[BUNDLED] < 0.99 * errors[None]


def test_the_fit_is_by_its_own_columns(reader: Any, families: Any) -> None:
    directory = reader("opt")
    with Engine(directory, device="sim", lossy=Lossy(weights="int4", calibrate=BUNDLED)) as engine:
        found = dict(decoded(engine))
        assert engine.calibrator.importances is not None
        columns = engine.calibrator.importances.columns
    for name, parameter in families("opt").model.named_parameters():
        if name in found:
            form = Packed(CODECS["int4"], *parameter.shape)
            assert torch.equal(found[name][0], form.dequantize(form.encode(parameter.detach(), columns[name])))


# The text.


def test_stretches() -> None:
    made = calibration.calibration(BUNDLED, byte_tokenizer(), 512)
    assert {len(row) for row in made.rows} == {TOKENS}
    assert all(row[0] == 0 and 0 not in row[1:] for row in made.rows)
    read = byte_tokenizer().decode(made.rows[ROWS // 2][1:])
    assert read in texts.calibration()
    assert read not in texts.sample()
    assert {len(row) for row in calibration.calibration(BUNDLED, byte_tokenizer(), 20).rows} == {20}


def test_texts_that_are_refused(tmp_path: Path) -> None:
    little, latin = tmp_path / "little.txt", tmp_path / "latin.txt"
    little.write_text("x" * 100)
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(InvalidInput, match=r"little.txt has 100 tokens; calibrating takes 1,504; give a longer text"):
        calibration.calibration(str(little), byte_tokenizer(), None)
    for path in (latin, tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidInput, match="cannot be read as UTF-8 text"):
            calibration.calibration(str(path), byte_tokenizer(), None)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="is a pipe or a device"):
        calibration.check(str(tmp_path / "pipe"), byte_tokenizer())
    with pytest.raises(InvalidInput, match="no tokenizer"):
        calibration.calibration(BUNDLED, None, None)


@pytest.mark.parametrize("lossy", [dict(), dict(cache="int4"), dict(weights="int8"), dict(compute="int8")])
def test_what_has_no_use_for_it_is_refused(lossy: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"set weights to one of int4, int3, int2, set sparsify, or leave"):
        Lossy(**lossy, calibrate=BUNDLED)
    with pytest.raises(InvalidInput, match="it must be the name of a text file"):
        Lossy(weights="int4", calibrate="")


def test_what_can_be_fitted() -> None:
    assert set(FITTED) == {name for name, codec in CODECS.items() if codec.fitted}


def test_models_with_other_configs_are_calibrated_apart(own_cache: Path, tmp_path: Path) -> None:
    """Though their weights are equal."""
    made = list[str]()
    for name, config in (("a", "relu"), ("b", "gelu"), ("c", "relu")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "config.json").write_text(config)
        opened = SimpleNamespace(given=[tmp_path / name / "model.safetensors"])
        source = SimpleNamespace(directory=tmp_path / name)
        core: Any = SimpleNamespace(source=source, opened=opened, dtype="float32", verifier=None)
        file = Calibration(((1, 2),))._prepared(
            core, ("calibration", 1), "found", lambda name=name: name, lambda found, path: path.write_text(found)
        )
        made.append(file.read_text())
    assert made == ["a", "b", "a"]
