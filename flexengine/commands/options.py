"""Command line options that decide the plan of a job, shared by run and plan."""

import argparse

from flexengine.errors import InvalidInput
from flexengine.job.source import FORMATS
from flexengine.lossy import ALLOW, BUNDLED, CACHE, COMPUTE, QUALITY, WEIGHTS, Lossy, choices
from flexengine.policy import Policy

AUTO = "auto"  # --policy: the planner chooses


def named(text: str) -> str:
    """Return the text. Raise ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a name or leave the option out")
    return text


def add_input_format(group: "argparse._ActionsContainer") -> None:
    """Add the option of the input's format."""
    group.add_argument("--input-format", choices=FORMATS,
                       help="format of the input (default: by its suffix; jsonl for a stream without one)")  # fmt: skip


def add_machine(group: "argparse._ArgumentGroup") -> None:
    """Add the options of the machine, and those of dtype and remote code."""
    group.add_argument("--trust-remote-code", action="store_true",
                       help="run Python code that comes with the checkpoint")  # fmt: skip
    group.add_argument("--allow-symlinks", action="store_true",
                       help="read files of the model's directory that are links to files outside of it")  # fmt: skip
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "sim"))
    group.add_argument("--device-mem", metavar="SIZE", help="device memory to use, e.g. 800M or 16GiB (cpu: RAM)")
    group.add_argument("--host-mem", metavar="SIZE", help="host memory to use beside a GPU")
    group.add_argument("--offload-dir", type=named, metavar="DIR", action="append",
                       help="where KV cache and activations spill to disk; give it once more for each further disk,"
                            " which may also hold a copy of some weights")  # fmt: skip


def add_lossy(group: "argparse._ArgumentGroup") -> None:
    """Add the lossy switches, and the options that let the planner choose them."""
    group.add_argument("--weights", choices=WEIGHTS, help="store matrices in this format")
    group.add_argument("--compute", choices=COMPUTE,
                       help="multiply matrices in this format; int8 stores weights in int8, too, unless --weights"
                            " is given")  # fmt: skip
    group.add_argument("--cache", choices=tuple(CACHE), help="store keys and values in this format")
    group.add_argument("--topk", type=float, metavar="SHARE",
                       help="when decoding, read only this share of the past values, e.g. 0.1")  # fmt: skip
    group.add_argument("--calibrate", nargs="?", const=BUNDLED, type=named, metavar="FILE",
                       help="first run the exact model over this UTF-8 text (default: a bundled text), once per model,"
                            " to measure which errors of encoded weights matter")  # fmt: skip
    group.add_argument("--quality", choices=tuple(QUALITY), default="exact",
                       help="let the planner choose among 8-bit formats (near), or also 4-bit formats (small)"
                            " (default: %(default)s)")  # fmt: skip
    group.add_argument("--allow", metavar="NAME,...",
                       help=f"let the planner choose from these: {', '.join(ALLOW)}")  # fmt: skip


def lossy_of(args: argparse.Namespace) -> Lossy:
    """Return the lossy switches in the arguments. Raise InvalidInput if a value is not allowed."""
    return Lossy(args.weights, args.compute, args.cache, args.topk, args.calibrate)


def allowed(args: argparse.Namespace, lossy: Lossy, policy: Policy | None) -> tuple[str, ...]:
    """Return the names that the planner may choose from. Raise InvalidInput if a name is unknown, or if lossy switches
    or a policy are given, too."""
    names = (*QUALITY[args.quality], *(args.allow.split(",") if args.allow is not None else ()))
    choices(names)
    if names and (lossy or policy is not None):
        other = "a policy" if policy is not None else f"{lossy}"
        raise InvalidInput(f"--quality and --allow let the planner choose, but {other} is given; leave out one of them")
    return names
