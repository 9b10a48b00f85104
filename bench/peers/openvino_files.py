"""A checkpoint as files of OpenVINO: `python -m bench.peers.openvino_files CHECKPOINT FOLDER float32|Q4_1`.

optimum-intel converts the model. The folder also gets a tokenizer of a few words, since OpenVINO GenAI does not start
without one. Q4_1 stands for 4 bits with a scale and a minimum per 64 weights, the format of flexengine's int4.
"""

import subprocess
import sys
from pathlib import Path

GROUP = 64  # weights with one scale


def files_of(checkpoint: Path, dtype: str) -> Path:
    """Return a folder with the files, beside the checkpoint. Make the folder, in another process, if there is none."""
    folder = checkpoint.with_name(f"{checkpoint.name}.openvino-{dtype}")
    if not (folder / "openvino_detokenizer.xml").exists():  # written last
        subprocess.run([sys.executable, "-m", "bench.peers.openvino_files", checkpoint, folder, dtype], check=True,
                       stdout=sys.stderr)  # fmt: skip
    return folder


def convert(checkpoint: Path, folder: Path, dtype: str) -> None:
    """Write the files."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    four = OVWeightQuantizationConfig(bits=4, sym=False, group_size=GROUP, ratio=1.0) if dtype == "Q4_1" else None
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False, quantization_config=four
    )
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    toy = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    toy.pre_tokenizer = pre_tokenizers.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=toy, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    for name, part in zip(("tokenizer", "detokenizer"), convert_tokenizer(fast, with_detokenizer=True), strict=True):
        openvino.save_model(part, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
