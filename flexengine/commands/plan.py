"""flexengine plan MODEL: print a job's policy and its predicted time and bytes, without loading weights."""

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity
from flexengine.commands.exit_codes import DONE, exit_code
from flexengine.commands.messages import say
from flexengine.commands.open_engine import load_libraries, machine_kind, machine_options, open_bare, open_rows
from flexengine.commands.options import (
    AUTO,
    INPUT,
    MODEL,
    POLICY,
    add_lengths,
    add_lossy,
    add_machine,
    add_rows,
    allowed,
    file_name,
    lossy_of,
    policy_file,
    policy_of,
)
from flexengine.commands.parser import Parser
from flexengine.commands.plan_cluster import add_cluster, check_without, plan_cluster
from flexengine.commands.plan_cluster import check as check_cluster
from flexengine.commands.plan_slices import check as check_slices
from flexengine.commands.plan_slices import print_slices
from flexengine.commands.written import check_written, write, writing
from flexengine.config import SamplingParams, parse_size
from flexengine.errors import FlexError, InvalidInput, ModelNotFound
from flexengine.lossy import MIXED, Lossy, choices
from flexengine.plan import explain, links, lp, stagger
from flexengine.plan.candidates import Options
from flexengine.plan.capacity import check_places
from flexengine.plan.cost import Cost
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware
from flexengine.plan.min_memory import fitting, lay_out_given, left_out
from flexengine.plan.picture import check, plot
from flexengine.plan.placement import placement_problem
from flexengine.plan.prediction import Prediction
from flexengine.plan.search import Search, frontier, search
from flexengine.plan.search import check as check_least
from flexengine.plan.whatif import ideas
from flexengine.plan.workload import Workload
from flexengine.policy import Policy

if TYPE_CHECKING:
    from flexengine.worker.open_model import OpenModel

PROMPT_TOKENS, ROWS = 512, 1000
_MOST = {"prompt_tokens": 2**20, "rows": 2**31 - 1}


def parser() -> Parser:
    """Return the argument parser."""
    p = Parser("plan", "Choose and explain the policy of a job, without loading weights.",
               "MODEL may be a directory that holds only config.json. flexengine measure measures this"
               " machine.", "[MODEL]")  # fmt: skip
    about = {"help": f"{MODEL['help']}, or a shape: {shipped.listed('models')}"}
    p.add_twin(p.add_argument_group("model"), "-m", "--model", **(MODEL | about))
    job = p.add_argument_group("job")
    job.add_argument("-i", "--input", **INPUT)
    add_rows(job)
    job.add_argument("--prompt-tokens", type=int, metavar="N",
                     help=f"without --input: prompt tokens of each row (default: {PROMPT_TOKENS}, or less in a short"
                          " context)")  # fmt: skip
    job.add_argument("--rows", type=int, metavar="N", help=f"without --input: number of rows (default: {ROWS})")
    add_lengths(job)
    machine = p.add_argument_group("machine")
    machine.add_argument("--hardware", metavar="FILE.json",
                         help="rates and capacities of a machine (default: this machine, measured): a file, or one of"
                              f" {shipped.listed('hardware')}")  # fmt: skip
    add_machine(machine)
    add_lossy(p.add_argument_group("lossy", "as for run"))
    add_cluster(p.add_argument_group("cluster", "a pipeline over several devices"))
    output = p.add_argument_group("output")
    policy = {"help": f"{POLICY['help']}; {shipped.listed('policies')}"}
    output.add_argument("--policy", **(POLICY | policy))
    output.add_argument("--compare", metavar="FILE.json", action="append",
                        help="rank this policy and that of --policy; may be repeated; a file, or a shipped"
                             " policy")  # fmt: skip
    output.add_argument("--frontier", action="store_true", help="print latency against throughput")
    output.add_argument("--latency", type=float, metavar="SECONDS", help="most seconds of a row, on average")
    output.add_argument("--slices", action="store_true",
                        help="print the tensors that cross between attention and the rest of the model, in bytes per"
                             " token, instead of a plan")  # fmt: skip
    output.add_argument("--plot", type=file_name, metavar="FILE.png", help="draw the plan, too (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="print the numbers as JSON")
    output.add_argument("--save", type=file_name, metavar="FILE.json",
                        help="write the policy, for run --policy; with --cluster the strategy")  # fmt: skip
    output.add_argument(
        "--save-lp", type=file_name, metavar="FILE.lp", help="write the linear program of the policy's block shape"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 0 done, 2 refused, 3 failed, 130 interrupted."""

    def command() -> int:
        plan(parser().parse_args(argv))
        return DONE

    return exit_code(command)


def plan(args: argparse.Namespace) -> None:
    """Plan a job, print the report, and write the files named by options. Raise FlexError if an option is wrong or no
    plan fits."""
    if args.cluster is not None:
        check_cluster(args)
    elif args.slices:
        check_slices(args)
    _check(args)
    if args.cluster is not None:
        plan_cluster(args, _workload)
        return
    if args.slices:
        _print_slices(args)
        return
    given = policy_of(args)
    lossy = lossy_of(args)
    if lossy.weights == MIXED:
        raise InvalidInput("--weights mixed chooses bits by reading the weights, which plan does not; let flexengine"
                           f" quality --weights mixed --budget {args.budget} --save-bits bits.json choose, and give"
                           " --layer-bits bits.json instead")  # fmt: skip
    names = allowed(args, lossy, given)
    if lossy.calibrate:
        say("--calibrate does not change a plan: weights take the same bytes and seconds with it")
    compared = [(path, Policy.load(shipped.find_file("policies", path))) for path in args.compare or ()]
    other = _other_machine(args) if args.hardware else None
    load_libraries()
    opened = _opened(args, other.kind if other else machine_kind(args), lossy)
    rows = _workload(args, opened)
    among = _choices(opened, names)
    if among:
        lossy = _choose(args, opened, rows, other, among)
        say(f"chosen: {lossy.described}")
    hardware = other or _measured(args, opened, rows, given)
    options = Options(latency_limit=args.latency, frontier=args.frontier)

    def planned(work: Workload) -> Search | Prediction:
        machine = opened.facts, hardware, work
        return _priced(*machine, given) if given is not None else search(*machine, options)

    with activity("planning", "searching the policy with the shortest predicted time"):
        answer, largest, why = fitting(rows, planned)
    if message := left_out(rows, largest, why):
        say(message)
    name = f"{opened.source.name} ({lossy})" if lossy else opened.source.name
    case = (opened.facts, hardware, rows.up_to(largest))
    searched = answer if isinstance(answer, Search) else None
    prediction = answer.best if isinstance(answer, Search) else answer
    head = {"model": opened.source.name, "lossy": lossy.enabled, "hardware": hardware.name}
    print(_report(args, name, head, case, searched, prediction, compared))
    if args.plot:
        curve = frontier(searched) if searched and args.frontier else ()
        plot(prediction, hardware, args.plot, f"{name} on {hardware.name}", curve)
    if args.save:
        write(args.save, json.dumps(prediction.policy.to_json(), indent=1))
    if args.save_lp:
        with writing(args.save_lp):
            lp.save(placement_problem(*case, prediction.policy, options), args.save_lp)


def _print_slices(args: argparse.Namespace) -> None:
    kind = _other_machine(args).kind if args.hardware else machine_kind(args)
    load_libraries()
    print_slices(args, _opened(args, kind, Lossy()))


def _report(
    args: argparse.Namespace, name: str, head: dict[str, Any], case: tuple[ModelFacts, Hardware, Workload],
    searched: Search | None, prediction: Prediction, compared: Sequence[tuple[str, Policy]],
) -> str:  # fmt: skip
    """Return the text to print: a comparison, a frontier, or the report.

    Args:
        name: model and lossy switches.
        head: first fields of JSON output.
        case: model, machine and rows.
        searched: the search for the policy; None if the policy was given.
        prediction: prediction of the chosen or given policy.
        compared: file name and policy, for --compare.
    """
    model, hardware, workload = case
    title = f"{name} on {explain.machine(hardware)}\n{explain.job_size(workload)}\n\n"
    if compared:
        entries = [(args.policy, prediction), *((path, _tried(*case, policy)) for path, policy in compared)]
        if args.json:
            return _json(head | {"policies": [{"name": n} | _entry(p, hardware) for n, p in entries]})
        return title + explain.compare(entries, hardware)
    if args.frontier and searched:
        curve = frontier(searched)
        if args.json:
            return _json(head | {"frontier": [explain.as_json(p, hardware) for p in curve]})
        return title + explain.frontier_text(curve, len(curve) if args.verbose else explain.MAX_FRONTIER_LINES)
    options = Options(latency_limit=args.latency)
    better = ideas(*case, prediction, searched is not None, options, args.verbose)
    if args.json:
        more = links.as_json(*case, prediction) | stagger.as_json(model, hardware, prediction)
        helped = {"helps": [h._asdict() for h in better]}
        return _json(head | explain.as_json(prediction, hardware) | more | helped)
    return explain.report(name, model, hardware, workload, prediction, better, args.verbose)


def _priced(model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy) -> Prediction:
    return Cost(model, hardware, workload).predict(lay_out_given(model, policy, workload, hardware.capacity))


def _tried(model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy) -> Prediction | FlexError:
    try:
        return _priced(model, hardware, workload, policy)
    except FlexError as error:
        return error


def _entry(outcome: Prediction | FlexError, hardware: Hardware) -> dict[str, Any]:
    return {"error": str(outcome)} if isinstance(outcome, FlexError) else explain.as_json(outcome, hardware)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False)


# Options and inputs.


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if options exclude each other, a value is not allowed, or a file cannot be written. Called
    before all other work."""
    if args.cluster is None:
        check_without(args)
    for name, most in _MOST.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and args.input:
            raise InvalidInput(f"{option} and --input are both given, but {args.input} has its own rows; leave one out")
        if value is not None and not 1 <= value <= most:
            raise InvalidInput(f"{option} is {value}; it must be at least 1 and at most {most:,}")
    if args.limit is not None and args.limit < 1:
        raise InvalidInput(f"--limit is {args.limit}; it must be at least 1")
    if args.latency is not None and not 0 < args.latency < math.inf:
        raise InvalidInput(f"--latency is {args.latency}; it must be a positive number of seconds")
    for option in ("limit", "prompt_column", "input_format", "chat", "score"):
        if getattr(args, option) and not args.input:
            raise InvalidInput(f"--{option.replace('_', '-')} needs the rows of a file; give --input, too")
    if not args.prefix_sharing and not args.input:
        raise InvalidInput("--no-prefix-sharing needs the rows of a file; give --input, too")
    for option, other in (("frontier", "compare"), ("offload_dir", "hardware")):
        if getattr(args, option) and getattr(args, other):
            option = option.replace("_", "-")
            raise InvalidInput(f"--{option} has no effect with --{other}; leave one out")
    for option in ("frontier", "latency"):
        if args.policy != AUTO and getattr(args, option):
            raise InvalidInput(f"--{option} is for the search of a policy; leave --policy out")
    if args.plot:
        check(args.plot)
    hardware = args.hardware and shipped.find("hardware", args.hardware)
    read = {"--input": args.input, "--hardware": hardware, "--policy": policy_file(args), "--config": args.config,
            "--calibration-text": args.calibration_text, "--layer-bits": args.layer_bits}  # fmt: skip
    read |= {f"--compare {name}": shipped.find("policies", name) for name in args.compare or ()}
    check_written({f"--{x.replace('_', '-')}": getattr(args, x) for x in ("plot", "save", "save_lp")}, read, args.model)


def _opened(args: argparse.Namespace, kind: str, lossy: Lossy) -> "OpenModel":
    """Open the model, or the shipped shape of this name, without weights."""
    if args.model is not None:
        args.model = shipped.find("models", args.model)
    try:
        return open_bare(args, kind, lossy)
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; {shipped.listed('models')}") from error


def _choices(opened: "OpenModel", names: Sequence[str]) -> list[Lossy]:
    """Return the switches that the planner may choose from, exact first; [] if it may not choose."""
    made = choices(names) if names else ()
    if unsuited := next(filter(None, map(opened.refusal, made)), None):
        say(f"not considered: {unsuited}")
    return [lossy for lossy in made if opened.refusal(lossy) is None]


def _choose(
    args: argparse.Namespace, opened: "OpenModel", workload: Workload, other: Hardware | None, among: Sequence[Lossy]
) -> Lossy:
    """Set and return the switches with the shortest predicted time, as run chooses them."""
    from flexengine.engine import planner as planners

    if other is None:
        with closing(machine_options(args).machine()) as machine:
            planner = planners.Planner(machine, opened)
            return planner.least_lossy(workload, among)

    def seconds(lossy: Lossy) -> float:
        opened.use(lossy)
        return search(opened.facts, other, workload).best.total_seconds

    opened.use(best := planners.least_lossy(among, seconds))
    return best


def _measured(args: argparse.Namespace, opened: "OpenModel", workload: Workload, policy: Policy | None) -> Hardware:
    """Return this machine's rates. Raise, before measuring, OutOfMemory if the machine can hold none of the rows, and
    InvalidInput if it lacks a place of the given policy."""
    from flexengine.engine.rates import RateStore

    options = machine_options(args)
    with closing(options.machine()) as machine:
        if policy is not None:
            check_places(policy, machine.capacity)
        fitting(workload, lambda work: check_least(opened.facts, work, machine.capacity))
        machine.say_no_offload()
        return RateStore(machine, opened).measured()


def _other_machine(args: argparse.Namespace) -> Hardware:
    """Return the machine of a hardware file. Sizes given as options replace those of the file."""
    hardware = Hardware.load(shipped.find_file("hardware", args.hardware))
    if args.device not in ("auto", hardware.kind):
        raise InvalidInput(f"--device is {args.device}, but {args.hardware} is of kind {hardware.kind}; leave one out")
    if args.host_mem and hardware.shared:
        raise InvalidInput(f"--host-mem is for machines with a GPU, but {args.hardware} has none; use --device-mem")
    device = parse_size(args.device_mem, "--device-mem") if args.device_mem else hardware.device_bytes
    host = parse_size(args.host_mem, "--host-mem") if args.host_mem else hardware.host_bytes
    return replace(hardware, device_bytes=device, host_bytes=host)


def _workload(args: argparse.Namespace, opened: "OpenModel") -> Workload:
    """Return the sizes of the job's rows. Raise InvalidInput if there is no row to run."""
    params = SamplingParams(max_tokens=args.max_tokens, n=args.n)
    if not args.input:
        most = opened.skeleton.context_length
        room = most - params.max_tokens if most else PROMPT_TOKENS
        if room < 1:
            raise InvalidInput(f"--max-tokens {params.max_tokens} leaves no room for a prompt in the {most} tokens of"
                               f" {opened.source.name}'s context; lower it")  # fmt: skip
        prompt = args.prompt_tokens or min(PROMPT_TOKENS, room)
        if most and prompt + params.max_tokens > most:
            raise InvalidInput(f"--prompt-tokens {prompt} and --max-tokens {params.max_tokens} make more than the"
                               f" {most} tokens of {opened.source.name}'s context; lower one")  # fmt: skip
        return Workload({(prompt, params.max_tokens): (args.rows or ROWS) * params.n})
    from flexengine.engine import planner as planners
    from flexengine.engine.survey import Refused

    refused = Refused()
    with open_rows(args) as rows:
        workload = planners.workload(opened, rows, params, args.trust_remote_code, refused, args.prefix_sharing)
    refused.report(workload, args.input)
    return workload
