"""What is refused of quantised checkpoints, before anything is read as numbers: with tensor, value and remedy."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexengine.codec.by_inputs import ByInputs
from flexengine.codec.forms import WeightFormat, make_form
from flexengine.errors import BadCheckpoint, UnsupportedModel
from flexengine.lossy import Lossy
from flexengine.model import encoding
from flexengine.model.config import load_config
from flexengine.model.encoding import decoded_size, read_part
from flexengine.model.quantised import checked
from flexengine.model.quantised.compressed import matches
from flexengine.model.quantised.schemes import METHODS
from flexengine.worker.open_model import OpenModel, open_model
from tests.helpers.families import make_checkpoint
from tests.helpers.pages import ROOT
from tests.helpers.quantised import Encoded, awq, blocks_of_4_bits, fp8, gptq, int8, llm_int8, nvfp4, packed, quantise

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Q = "model.layers.2.self_attn.q_proj"
FP8 = {"quant_method": "fp8", "weight_block_size": [24, 40]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
WEIGHTS = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
      "config_groups": {"all": {"targets": ["Linear"], "weights": WEIGHTS}}}  # fmt: skip
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
INT8 = {
    **CT,
    "config_groups": {"a": {"targets": ["Linear"], "weights": dict(type="int", num_bits=8, strategy="channel")}},
}
NVFP4 = {**CT, "format": "nvfp4-pack-quantized", "config_groups": {"a": {"targets": ["Linear"], "weights": dict(
    type="float", num_bits=4, strategy="tensor_group", group_size=16)}}}  # fmt: skip
ENCODERS: dict[str, tuple[Config, Callable[[Any], Encoded]]] = {
    "fp8": (FP8, lambda x: fp8(x, (24, 40))),
    "gptq": (GPTQ, lambda x: gptq(x, 4, 16)),
    "gptq sym": ({**GPTQ, "sym": True}, lambda x: gptq(x, 4, 16, symmetric=True)),
    "awq": (AWQ, lambda x: awq(x, 16)),
    "ct": (CT, lambda x: packed(x, 4, 32, True)),
    "ct8": (INT8, int8),
    "nf4": (BNB, blocks_of_4_bits),
    "llm.int8": (BNB, llm_int8),
    "nested": (BNB, lambda x: blocks_of_4_bits(x, "nf4", True)),
    "nvfp4": (NVFP4, lambda x: nvfp4(x, True)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda x: nvfp4(x, False)),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "made"
    make_checkpoint("llama", folder)
    return folder


@pytest.fixture(scope="module")
def made(plain: Path) -> Callable[[str], Path]:
    """A checkpoint in a scheme, of which one matrix is quantised."""

    def make(scheme: str) -> Path:
        target = plain.parent / scheme
        if not target.exists():
            settings, encode = ENCODERS[scheme]
            quantise(plain, target, settings, lambda _, x: encode(x), r"layers\.2\..*q_proj\.weight$")
        return target

    return make


def opened(source: Path, folder: Path, change: Callable[[Tensors, Config], object]) -> OpenModel:
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(str(folder), None, "cpu")


def put(name: str, index: Any, value: float) -> Callable[[Tensors, Config], object]:
    return lambda tensors, _: tensors[name].__setitem__(index, value)


def drop(*names: str) -> Callable[[Tensors, Config], object]:
    return lambda tensors, _: [tensors.pop(name) for name in names]


def cut(name: str, dim: int = 0) -> Callable[[Tensors, Config], object]:
    return lambda tensors, _: tensors.update({name: tensors[name].narrow(dim, 0, tensors[name].shape[dim] - 1).clone()})


def set_to(**values: Any) -> Callable[[Tensors, Config], object]:
    return lambda _, config: config.update(values)


def group(**values: Any) -> Callable[[Tensors, Config], object]:
    return set_to(config_groups={"a": {"targets": ["Linear"], "weights": {**WEIGHTS, **values}}})


def add(name: str, like: torch.Tensor) -> Callable[[Tensors, Config], object]:
    return lambda tensors, _: tensors.update({name: like})


def one_scale_for_all_experts(tensors: Tensors, _: Config) -> None:
    tensors[f"{Q}.weight"] = torch.stack([tensors[f"{Q}.weight"]] * 2)
    tensors[f"{Q}.weight_scale_inv"] = torch.tensor(0.5)


def about(**values: Any) -> Callable[[Tensors, Config], object]:
    """Change what bitsandbytes states about the matrix."""
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"

    def change(tensors: Tensors, _: Config) -> None:
        stated = {**json.loads(bytes(tensors[name].tolist())), **values}
        tensors[name] = torch.tensor([*json.dumps(stated).encode()], dtype=torch.uint8)

    return change


HOSTILE: list[tuple[str, Callable[[Tensors, Config], object], str]] = [
    ("fp8", put(f"{Q}.weight_scale_inv", (1, 0), float("nan")), f"{Q}.weight_scale_inv holds the scale nan at [1, 0]"),
    ("fp8", put(f"{Q}.weight_scale_inv", (0, 1), float("inf")), "holds the scale inf at [0, 1], and a scale must be"),
    ("fp8", drop(f"{Q}.weight_scale_inv"), f"tensor {Q}.weight is in FP8, but its scales, {Q}.weight_scale_inv, are"),
    ("fp8", one_scale_for_all_experts, "it must be [3, 2], [64, 1] or [1] for each of 2 experts, as weight_block_size"),
    ("fp8", cut(f"{Q}.weight_scale_inv"), "as scales of " + Q + ".weight [64, 64]; it must be [3, 2], [64, 1] or [1]"),
    ("fp8", set_to(weight_block_size=[128, 128]), "it must be [1, 1], [64, 1] or [1], as weight_block_size is [128, 1"),
    ("fp8", set_to(weight_block_size=[0, 128]), "weight_block_size is [0, 128]; it must be two sizes"),
    ("fp8", set_to(weight_block_size="x"), "weight_block_size is 'x'; it must be two sizes"),
    ("fp8", set_to(fmt="e5m2"), "fmt is 'e5m2'; E4M3 is read only; take the model's unquantised checkpoint"),
    ("fp8", drop(f"{Q}.weight"), "states quantised weights (fp8), but no tensor is quantised; remove the entry"),
    (
        "fp8",
        add("model.embed_tokens.weight", torch.zeros(601, 64).to(torch.float8_e4m3fn)),
        "model.embed_tokens.weight",
    ),
    ("gptq", drop(f"{Q}.qzeros"), f"{Q} is quantised, but its tensor {Q}.qzeros is missing; download it again"),
    ("gptq", drop(f"{Q}.scales"), f"its tensor {Q}.scales is missing"),
    (
        "gptq",
        cut(f"{Q}.qzeros"),
        f"the tensors of {Q} do not fit each other (qweight [8, 64] torch.int32, qzeros [3, 8",
    ),
    ("gptq", set_to(bits=8), f"{Q} do not fit each other"),
    ("gptq", set_to(bits=5), "bits is 5 and group_size 16; 2, 3"),
    ("gptq", set_to(group_size=32), "expected are 2 groups of 32 columns"),
    ("gptq", set_to(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; gptq and gptq_v2 are read"),
    ("gptq", set_to(dynamic={"x": {}}), "dynamic sets bits by module, which is not read"),
    ("gptq", put(f"{Q}.scales", (0, 3), float("inf")), f"tensor {Q}.scales holds the scale inf at [0, 3]"),
    ("gptq", put(f"{Q}.qzeros", (0, 0), -1), f"{Q}.qzeros holds 15 in checkpoint_format gptq, which is one too many"),
    ("gptq", put(f"{Q}.g_idx", 0, 9), f"tensor {Q}.g_idx is torch.int32 with 0 to 9; it must be int32, from 0 to 3"),
    ("gptq", put(f"{Q}.g_idx", 0, 1), "reorders columns, but quantization_config says desc_act false"),
    ("gptq sym", put(f"{Q}.qzeros", (0, 0), 0x77777776), f"{Q}.qzeros holds 6 to 7, but zero points of a symmetric"),
    ("awq", set_to(version="gemv"), "version 'gemv'"),
    ("awq", set_to(bits=8), "bits 8"),
    ("awq", set_to(zero_point=False), "zero_point false; 4 bits, gemm, with zero points are read"),
    ("awq", cut(f"{Q}.scales"), f"the tensors of {Q} do not fit each other"),
    ("ct", set_to(ignore=[Q]), f"{Q} is quantised, but quantization_config ignores it"),
    ("ct", set_to(ignore=["re:.*q_proj"]), "ignores it"),
    ("ct", set_to(config_groups={}), "no group of"),
    ("ct", set_to(ignore=["re:("]), "quantization_config of compressed-tensors cannot be read: error"),
    ("ct", set_to(config_groups=7), "quantization_config of compressed-tensors cannot be read"),
    ("ct", group(group_size=64), f"tensor {Q}.weight_scale has the shape [64, 2], of a matrix [64, 64] with strategy"),
    ("ct", group(num_bits=3), f"{Q} has 3 bits of type 'int' in torch.int32 with scales in bf16, which is not read"),
    ("ct", group(symmetric=False), f"{Q} is not symmetric, but its zero points, {Q}.weight_zero_point, are missing"),
    ("ct", set_to(format="marlin-24"), "format is 'marlin-24'; read are pack-quantized"),
    ("ct", set_to(transform_config={"a": 1}), "has transform_config, which is not read"),
    ("ct", set_to(sparsity_config={"format": "sparse-24"}), "has sparsity_config 'sparse-24', which is not read"),
    ("ct", drop(f"{Q}.weight_scale"), f"{Q} is quantised, but its scales, {Q}.weight_scale, are missing"),
    ("ct", add(f"{Q}.weight_g_idx", torch.zeros(64, dtype=torch.int32)), "columns in an order of their own"),
    ("ct", add(f"{Q}.weight_zero_point", torch.ones(8, 2, dtype=torch.int32)), "is not 0, but the group is symmetric"),
    ("ct", put(f"{Q}.weight_shape", 1, 99), "weight_shape holds [64, 99], but"),
    ("ct8", put(f"{Q}.weight_scale", (5, 0), float("nan")), f"{Q}.weight_scale holds the scale nan at [5, 0]"),
    ("nf4", drop(f"{Q}.weight.absmax"), f"{Q}.weight is quantised (nf4), but its tensor {Q}.weight.absmax is missing"),
    ("nf4", cut(f"{Q}.weight.absmax"), f"tensor {Q}.weight.absmax is torch.float32 [63], of a matrix [64, 64] in bl"),
    (
        "nf4",
        put(f"{Q}.weight.quant_state.bitsandbytes__nf4", 0, 7),
        "quantization_config of bitsandbytes cannot be read",
    ),
    ("llm.int8", put(f"{Q}.SCB", 3, float("nan")), f"{Q}.SCB holds the scale nan at [3]"),
    ("llm.int8", put(f"{Q}.weight_format", (), 1), f"{Q}.weight_format is not 0"),
    ("llm.int8", cut(f"{Q}.SCB"), f"tensor {Q}.SCB is torch.float32 [63]; it must be F32 [64]"),
    ("ct", lambda t, _: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][None]}), "is a stack [1, 64"),
    ("nvfp4", put(f"{Q}.weight_global_scale", 0, 0.0), f"{Q}.weight_global_scale is torch.float32 [0.0], and divides"),
    ("nvfp4", add(f"{Q}.weight_global_scale", torch.ones(1).half()), f"{Q}.weight_global_scale is torch.float16 [1.0]"),
    ("nvfp4", put(f"{Q}.weight_global_scale", 0, float("nan")), f"{Q}.weight_global_scale holds the scale nan at [0]"),
    ("nested", about(nested_offset=float("nan")), "bitsandbytes__nf4 has the nested_offset nan, which must be finite"),
    (
        "nested",
        about(shape=[3, 5]),
        "a matrix [3, 5] in nf4-64-nested256 needs whole bytes of codes; download it again",
    ),
    ("modelopt", drop(f"{Q}.weight_scale_2"), f"{Q}.weight is in NVFP4, but its scale, {Q}.weight_scale_2, is missing"),
    ("modelopt", cut(f"{Q}.weight_scale", 1), f"scales of {Q}.weight [64, 64] do not fit it"),
    ("modelopt", set_to(quant_algo="W4A8_AWQ"), "quant_algo is 'W4A8_AWQ'; NVFP4 and FP8 are read"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "change", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_damaged_and_ambiguous_checkpoints_are_refused(
    made: Callable[[str], Path], tmp_path: Path, scheme: str, change: Callable[[Tensors, Config], object], text: str
) -> None:
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=re.escape(text)):
        opened(made(scheme), tmp_path, change)


def test_the_version_of_gptq_s_zero_points_is_read_from_symmetric_files(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever checkpoint_format says: all 8 is version 2, all 7 is version 1."""
    assert form_of(opened(made("gptq sym"), tmp_path, set_to(checkpoint_format="gptq_v2"))).less == 1
    change = lambda tensors, _: [t.fill_(-0x77777778) for n, t in tensors.items() if n.endswith("qzeros")]  # noqa: E731
    assert form_of(opened(made("gptq sym"), tmp_path, change)).less == 0


@pytest.mark.slow
def test_encodings_are_made_anew_after_a_change_of_the_config(
    made: Callable[[str], Path], tmp_path: Path, cache: Path
) -> None:
    """The same file in the other version of GPTQ's zero points has other numbers."""
    found = []
    for version in ("gptq", "gptq_v2", "gptq"):
        model = opened(made("gptq"), tmp_path, set_to(checkpoint_format=version))
        model.use(Lossy(weights="int4"))
        origin = model.prepare_weights()[f"{Q}.weight"]
        found.append(read_part(origin, 0, origin.nbytes))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_biases_of_0_are_left_out_and_others_are_refused(made: Callable[[str], Path], tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for each matrix, also where the model has none."""
    model = opened(made("gptq"), tmp_path, add(f"{Q}.bias", torch.zeros(64, dtype=torch.float16)))
    assert f"{Q}.weight" in model.forms
    assert f"{Q}.bias" not in model.locations
    one = torch.zeros(64, dtype=torch.float16).index_fill(0, torch.tensor(63), 2.0**-24)
    with pytest.raises(BadCheckpoint, match=re.escape(f"not used by the model: {Q}.bias (1)")):
        opened(made("gptq"), tmp_path, add(f"{Q}.bias", one))
    plain = Q.replace("layers.2", "layers.1")
    with pytest.raises(BadCheckpoint, match=re.escape(f"not used by the model: {plain}.bias (1)")):
        opened(made("gptq"), tmp_path, add(f"{plain}.bias", torch.zeros(64)))


def test_scales_are_read_once_for_the_same_file(
    made: Callable[[str], Path], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has changed is read again; a plan reads none."""
    calls, check = list[int](), checked.check_scales
    monkeypatch.setattr(checked, "check_scales", lambda *given: calls.append(1) or check(*given))
    opened(made("fp8"), tmp_path, lambda *_: None)
    assert not [*cache.glob("*.scales")]  # the file is too young
    monkeypatch.setattr(checked, "_SETTLED", -1e6)
    for _ in range(3):
        open_model(str(tmp_path), None, "cpu")
    assert len(calls) == 2
    assert len([*cache.glob("*.scales")]) == 1
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.weight_scale_inv"][1, 1] = float("nan")
    save_file(tensors, file)
    open_model(str(tmp_path), None, "cpu", weights=False)
    for _ in range(2):
        with pytest.raises(BadCheckpoint, match="holds the scale nan"):
            open_model(str(tmp_path), None, "cpu")
    assert len(calls) == 4


def test_experts_with_nested_scales_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path / "made")
    quantise(tmp_path / "made", tmp_path / "model", BNB, lambda _, x: blocks_of_4_bits(x, "nf4", True), r"experts\.")
    with pytest.raises(UnsupportedModel, match="nested scales, each with an offset of its own, which is not read"):
        open_model(str(tmp_path / "model"), None, "cpu")


def test_experts_are_decoded_once_to_be_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up projections lie in one matrix here, of two whose rows are encoded together."""
    make_checkpoint("qwen3-moe", tmp_path / "made")
    quantise(tmp_path / "made", tmp_path / "model", GPTQ, lambda _, x: gptq(x, 4, 16), r"experts\.")
    name = "model.layers.2.mlp.experts.gate_up_proj"
    origin = open_model(str(tmp_path / "model"), None, "cpu").locations[name]
    count, rows, columns = origin.shape
    right, calls, decode = read_part(origin, 0, decoded_size(origin)), [0], ByInputs.decode

    def counted(form: ByInputs, data: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        calls[0] += len(ids)
        return decode(form, data, ids)

    monkeypatch.setattr(ByInputs, "decode", counted)
    monkeypatch.setattr(encoding, "CHUNK", 16 * columns)
    found = [
        piece.rows for piece in encoding.pieces(name, origin, WeightFormat(make_form("int4", rows, columns), count))
    ]
    assert len(found) == count * rows // 16 > count
    assert torch.equal(torch.cat(found).view(-1), right)
    assert calls[0] == count * rows


def form_of(model: OpenModel) -> Any:
    return model.forms[f"{Q}.weight"].packed


def test_lists_of_modules_name_them_whole() -> None:
    """ "layers.1" is no part of "layers.12", as in other programs; a pattern matches from the first letter on."""
    assert matches("model.layers.1.q", "model.layers.1.q")
    assert not any(
        matches("model.layers.12.q", name) for name in ("layers.1", "model.layers.1", "q", "re:layers", "12")
    )
    assert matches("model.layers.12.q", "re:.*layers.1")


def test_groups_of_other_classes_and_of_activations_are_not_taken_for_those_of_matrices(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of patterns that match, the first of the alphabet counts, whatever the order of the groups."""
    eight = {**WEIGHTS, "num_bits": 8}
    for other, mine in (
        ({"targets": ["LlamaAttention"], "weights": None}, "Linear"),
        ({"targets": ["re:.*self_attn.*"], "weights": None}, "Linear"),
        ({"targets": ["Embedding"], "weights": eight}, "Linear"),
        ({"targets": ["re:model.*q_proj"], "weights": eight}, "re:.*q_proj"),
        ({"targets": ["re:.*q_proj"], "weights": eight}, Q),
    ):
        groups = {"a": other, "b": {"targets": [mine], "weights": WEIGHTS}}
        for order in (["a", "b"], ["b", "a"]):
            change = set_to(config_groups={name: groups[name] for name in order})
            assert form_of(opened(made("ct"), tmp_path, change)).name == "w4-32", (other, order)


def test_what_is_quantised_is_read_from_the_tensors(made: Callable[[str], Path], tmp_path: Path) -> None:
    """modules_to_not_convert with a part of a name: the tensors say that the matrix is quantised."""
    model = opened(made("fp8"), tmp_path, set_to(modules_to_not_convert=["q_proj", "layers.2"]))
    assert {*model.forms} == {f"{Q}.weight"}


def test_a_scale_of_a_matrix_divides_or_multiplies_by_its_name(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The same bits: compressed-tensors divides by weight_global_scale, ModelOpt multiplies by weight_scale_2."""
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    for divides in (True, False):
        error = np.abs(nvfp4(x, divides)[1] - x)
        assert error.max() < 0.6  # the helper that tokens are compared with is right in both
    for scheme in ("nvfp4", "modelopt"):
        model = opened(made(scheme), tmp_path, lambda *_: None)
        right = load_file(made(scheme).with_name(f"{scheme}-plain") / "model.safetensors")[f"{Q}.weight"]
        assert torch.equal(read_part(model.locations[f"{Q}.weight"], 0, right.nbytes).view(right.shape), right)

    def rename(tensors: Tensors, _: Config) -> None:
        tensors[f"{Q}.weight_scale_2"] = tensors.pop(f"{Q}.weight_global_scale")

    with pytest.raises(UnsupportedModel, match=r"float' in torch\.uint8 with scales in e4m3, which is not read"):
        opened(made("nvfp4"), tmp_path, rename)


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quark", "torchao", "eetq", 7, None])
def test_other_methods_are_refused_by_name(plain: Path, tmp_path: Path, method: Any) -> None:
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModel, match=r"which is not supported; known are fp8, .*take the model's unquantised"
    ):
        load_config(tmp_path)


def test_the_page_has_all_methods() -> None:
    page = (ROOT / "docs" / "quantised.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")][1:]
    assert sorted(name for cell in rows for name in re.findall(r"`([\w-]+)`", cell)) == sorted(METHODS)
