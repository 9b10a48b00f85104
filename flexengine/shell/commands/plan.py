"""flexengine plan MODEL: print a job's policy and its predicted time and bytes, without loading weights."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flexengine import shipped
from flexengine.activity import activity
from flexengine.config import SamplingParams, parse_size
from flexengine.errors import FlexError, InvalidInput
from flexengine.lossy import MIXED, TOKENS_PARTITION, Lossy, choices
from flexengine.plan import lp
from flexengine.plan.candidates import Options
from flexengine.plan.cluster.devices import links_around
from flexengine.plan.cost import Cost, Prediction
from flexengine.plan.facts import ModelFacts
from flexengine.plan.hardware import Hardware, check_places
from flexengine.plan.min_memory import fitting, lay_out_given, left_out
from flexengine.plan.placement import placement_problem
from flexengine.plan.search import Search, frontier, search
from flexengine.plan.sparse import sparse_warning
from flexengine.plan.workload import Workload
from flexengine.policy import Policy
from flexengine.shell.commands import openers
from flexengine.shell.commands import options as common
from flexengine.shell.commands import plan_others as others
from flexengine.shell.commands.messages import DONE, program, say
from flexengine.shell.commands.parser import Parser, check_least, refuse_given
from flexengine.shell.commands.sampling_options import LENGTHS
from flexengine.shell.explain import stagger
from flexengine.shell.explain import text as explain
from flexengine.shell.explain.picture import check, plot
from flexengine.shell.explain.whatif import ideas

if TYPE_CHECKING:
    from flexengine.engine.planner import Planner
    from flexengine.worker.open_model import OpenModel

PROMPT_TOKENS, ROWS = 512, 1000
_MOST = {"prompt_tokens": 2**20, "rows": 2**31 - 1}
_END = """\
MODEL may be a directory that holds only config.json. flexengine measure measures this machine.
"""
_JOB = f"""
--prompt-tokens N  without --input: prompt tokens of each row (default: {PROMPT_TOKENS}, or less in a short context)
--rows N           without --input: number of rows (default: {ROWS})
"""
_HARDWARE = f"""
--hardware FILE.json  rates and capacities of a machine (default: this machine, measured): a file, or one of
                      {shipped.listed("hardware")}
--stages N            plan N such machines, each with a part of the layers and tiers of its own (docs/pipeline.md);
                      --save then writes a strategy, for run --strategy
--stage-link RATE     network between the stages: bytes per second, and after a comma the seconds of a message, such
                      as 1.25G,1e-4 (default: takes no time)
"""
_OUTPUT = """
--compare FILE.json ...  rank this policy and that of --policy; may be repeated; a file, or a shipped policy
--frontier               print latency against throughput
--latency SECONDS        most seconds of a row, on average
--slices                 print the tensors that cross between attention and the rest of the model, in bytes per token,
                         instead of a plan
--plot FILE.png          draw the plan, too (needs matplotlib)
--json                   print the numbers as JSON
--save FILE.json         write the policy, for run --policy; with --cluster the strategy
--save-lp FILE.lp        write the linear program of the policy's block shape
"""


def parser() -> Parser:
    p = Parser("plan", "[MODEL]", _END)
    p.group("model", f"{common.MODEL}, or a shape: {shipped.listed('models')}")
    p.add_twin("model")
    p.group("job", common.INPUT, common.ROWS, _JOB, LENGTHS)
    p.group("machine", _HARDWARE, common.MACHINE)
    p.group("lossy", common.LOSSY, about="as for run")
    p.group("cluster", others.CLUSTER, about=others.ABOUT)
    policy = f"{common.POLICY.text.rstrip()}; {shipped.listed('policies')}"
    p.group("output", common.POLICY._replace(text=policy), _OUTPUT)
    return p


def run(args: argparse.Namespace) -> int:
    """Plan a job, or cut a model into slices. Return the exit code. Raise FlexError if an option is wrong or no plan
    fits."""
    try:
        _run(args)
    except _NothingToPlan as nothing:
        say(str(nothing))
        if args.json:
            print(json.dumps({"tokens": 0, "seconds": 0.0}))
    return DONE


def _run(args: argparse.Namespace) -> None:
    if args.cluster is not None:
        others.check_cluster(args)
        _check(args)
        others.plan_cluster(args, _workload)
    elif args.slices:
        unused = [name for name in args.changed if name not in others.WITH_SLICES]
        why = "has no effect with --slices, which depends on the model and its dtype; leave one out"
        refuse_given(args, unused, why)
        _check(args)
        kind = _other_machine(args).kind if args.hardware else None
        openers.load_libraries()
        others.print_slices(args, openers.open_bare(args, Lossy(), kind))
    else:
        _check(args)
        plan(args)


def plan(args: argparse.Namespace) -> None:
    """Plan a job, print the report, and write the files named by options."""
    given = common.policy_of(args)
    lossy, names = common.lossy_of(args, given)
    if lossy.weights == MIXED:
        choose = f"flexengine quality --weights mixed --budget {args.budget} --save-bits bits.json"
        remedy = f"let {choose} choose, and give --layer-bits bits.json instead"
        raise InvalidInput(f"--weights mixed chooses bits by reading the weights, which plan does not; {remedy}")
    if lossy.calibrate:
        say("--calibrate does not change a plan: weights take the same bytes and seconds with it")
    compared = [(path, Policy.load(shipped.find_file("policies", path))) for path in args.compare or ()]
    other = _other_machine(args) if args.hardware else None
    openers.load_libraries()
    opened = openers.open_bare(args, lossy, other.kind if other else None)
    rows = _workload(args, opened)
    made = choices(names) if set(names) - {TOKENS_PARTITION} and not others.chooses_bits(args) else ()
    if unsuited := next(filter(None, map(opened.refusal, made)), None):
        say(f"not considered: {unsuited}")
    if among := [each for each in made if opened.refusal(each) is None]:
        lossy = _choose(args, opened, rows, other, among)
        say(f"chosen: {lossy.described}")
    options = Options(latency_limit=args.latency, frontier=args.frontier, by_tokens=TOKENS_PARTITION in names)
    with ExitStack() as stack:
        rates: Callable[[], Hardware]
        best: Callable[[Workload], Search]
        if args.stages is not None:
            machine = other or stack.enter_context(_own_machine(args, opened, rows, given)).rates.known()
            return others.plan_stages(args, opened, machine, rows, lossy)
        if other:
            stack.enter_context(activity("planning", "searching the policy with the shortest predicted time"))
            rates, best = lambda: other, lambda work: search(opened.facts, other, work, options)
        else:
            planner = stack.enter_context(_own_machine(args, opened, rows, given))
            rates, best = planner.rates.known, partial(planner.search, options=options)  # may measure

        def planned(work: Workload) -> Search | Prediction:
            return best(work) if given is None else _priced(opened.facts, rates(), work, given)

        (answer, largest, why), hardware = fitting(rows, planned), rates()
    if message := left_out(rows, largest, why):
        say(message)
    name = f"{opened.source.name} ({lossy})" if lossy else opened.source.name
    case = (opened.facts, hardware, rows.up_to(largest))
    searched = answer if isinstance(answer, Search) else None
    prediction = answer.best if isinstance(answer, Search) else answer
    if warning := sparse_warning(Cost(*case), prediction):
        say(warning)
    head = {"model": opened.source.name, "lossy": lossy.enabled, "hardware": hardware.name}
    print(_report(args, name, head, case, searched, prediction, compared))
    if args.plot:
        curve = frontier(searched) if searched and args.frontier else ()
        plot(prediction, hardware, args.plot, f"{name} on {hardware.name}", curve)
    if args.save:
        common.write(args.save, json.dumps(prediction.policy.to_json(), indent=1))
    if args.save_lp:
        with common.writing(args.save_lp):
            lp.save(placement_problem(*case, prediction.policy, options), args.save_lp)


def _report(
    args: argparse.Namespace, name: str, head: dict[str, Any], case: tuple[ModelFacts, Hardware, Workload],
    searched: Search | None, prediction: Prediction, compared: Sequence[tuple[str, Policy]],
) -> str:  # fmt: skip
    """Return the text to print: a comparison, a frontier, or the report. head: first fields of JSON output."""
    model, hardware, workload = case
    title = f"{name} on {explain.machine(hardware, model)}\n{explain.job_size(workload)}\n\n"
    values: dict[str, Any]
    if compared:
        entries: list[tuple[str, Prediction | FlexError]] = [(args.policy, prediction)]
        for path, policy in compared:
            try:
                entries.append((path, _priced(*case, policy)))
            except FlexError as error:
                entries.append((path, error))
        numbers = [{"error": str(x)} if isinstance(x, FlexError) else explain.as_json(x, hardware) for _, x in entries]
        values = {"policies": [{"name": name} | x for (name, _), x in zip(entries, numbers, strict=True)]}
        text = title + explain.compare(entries, hardware)
    elif args.frontier and searched:
        curve = frontier(searched)
        values = {"frontier": [explain.as_json(point, hardware) for point in curve]}
        text = title + explain.frontier_text(curve, len(curve) if args.verbose else explain.MAX_FRONTIER_LINES)
    else:
        better = ideas(*case, prediction, searched is not None, Options(latency_limit=args.latency), args.verbose)
        values = explain.as_json(prediction, hardware) | stagger.as_json(*case, prediction)
        values |= {"helps": [each._asdict() for each in better]}
        text = explain.report(name, *case, prediction, better, args.verbose)
    return json.dumps(head | values, allow_nan=False) if args.json else text


def _priced(model: ModelFacts, hardware: Hardware, workload: Workload, policy: Policy) -> Prediction:
    return Cost(model, hardware, workload).predict(lay_out_given(model, policy, workload, hardware.capacity))


# Options and inputs.


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidInput if options exclude each other, a value is not allowed, or a file cannot be written. Called
    before all other work."""
    if args.cluster is None:
        of_cluster = [name for name in others.CLUSTER_ONLY if args.stages is None or name not in others.BITS_ONLY]
        refuse_given(args, of_cluster, "is for a plan with --cluster; give --cluster, or leave it out")
        others.check_bits(args)
    for name, most in _MOST.items():
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            option = args.changed[name]
            raise InvalidInput(f"{option} is {value}; it must be at least 1 and at most {most:,}")
    if args.input:
        why = f"and --input are both given, but {args.input} has its own rows; leave one out"
        refuse_given(args, _MOST, why)
    else:
        names = ["limit", "prompt_column", "input_format", "chat", "score", "prefix_sharing"]
        names += ["row_options", "template", "delimiter"]
        refuse_given(args, names, "needs the rows of a file; give --input, too")
    check_least(args, limit=1, stages=1)
    if args.cluster is not None:
        refuse_given(args, ["stage_link"], "is for --stages; the file of --cluster has its own links")
    if args.stages in (None, 1):
        given = args.stages or "not given"
        refuse_given(args, ["stage_link"], f"is the network between stages, but --stages is {given}; leave it out")
    if args.stages is not None:
        refuse_given(args, ["cluster"], "describes other machines than --stages; leave one out")
        links_around(args.stage_link, args.stages)
        why = "is for the plan of one machine, but --stages is given; leave one out"
        refuse_given(args, ("policy", "compare", "frontier", "latency", "plot", "save_lp"), why)
        if TOKENS_PARTITION in (args.allow or "").split(","):
            what = "divides attention among attention workers, which --stages does not plan"
            raise InvalidInput(f"--allow {TOKENS_PARTITION} {what}; leave one out")
    if args.latency is not None and not 0 < args.latency < math.inf:
        raise InvalidInput(f"--latency is {args.latency}; it must be a positive number of seconds")
    for option, other in (("frontier", "compare"), ("offload_dir", "hardware")):
        if other in args.changed:
            refuse_given(args, [option], f"has no effect with {args.changed[other]}; leave one out")
    if "policy" in args.changed:
        refuse_given(args, ("frontier", "latency"), "is for the search of a policy; leave --policy out")
    if args.plot:
        check(args.plot)
    hardware = args.hardware and shipped.find("hardware", args.hardware)
    read = {f"--compare {name}": shipped.find("policies", name) for name in args.compare or ()}
    read |= {"--input": args.input, "--hardware": hardware, "--harm": args.harm}
    common.check_written(args, {"--plot": args.plot, "--save": args.save, "--save-lp": args.save_lp}, read)


def _choose(
    args: argparse.Namespace, opened: "OpenModel", workload: Workload, other: Hardware | None, among: Sequence[Lossy]
) -> Lossy:
    """Set and return the switches with the shortest predicted time, as run chooses them."""
    from flexengine.engine import planner as planners

    if other is None:
        with closing(openers.machine_options(args).machine()) as machine:
            planner = planners.Planner(machine, opened)
            return planner.least_lossy(workload, among)

    def seconds(lossy: Lossy) -> float:
        opened.use(lossy)
        if args.stages is not None:
            return others.chain_seconds(args, opened, other, workload)
        return search(opened.facts, other, workload).best.total_seconds

    opened.use(best := planners.least_lossy(among, seconds))
    return best


@contextmanager
def _own_machine(
    args: argparse.Namespace, opened: "OpenModel", workload: Workload, policy: Policy | None
) -> Iterator["Planner"]:
    """Yield a planner for this machine, which has measured the model briefly. Raise, before measuring, OutOfMemory if
    the machine can hold none of the rows, and InvalidInput if it lacks a place of the given policy."""
    from flexengine.engine.planner import Planner

    options = openers.machine_options(args)
    with closing(options.machine()) as machine:
        if policy is not None:
            check_places(policy, machine.capacity)
        machine.say_no_offload()
        planner = Planner(machine, opened, policy=policy)
        if args.stages is None:  # several machines may hold what one cannot
            planner.check(workload)
        planner.rates.measure_quickly()
        yield planner


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
    """Return the sizes of the job's rows. Raise InvalidInput if no row can be run."""
    params = SamplingParams(max_tokens=args.max_tokens, n=args.n)
    if not args.input:
        most = opened.skeleton.context_length
        context = f"the {most} tokens of {opened.source.name}'s context"
        room = most - params.max_tokens if most else PROMPT_TOKENS
        if room < 1:
            raise InvalidInput(f"--max-tokens {params.max_tokens} leaves no room for a prompt in {context}; lower it")
        prompt = args.prompt_tokens or min(PROMPT_TOKENS, room)
        if most and prompt + params.max_tokens > most:
            both = f"--prompt-tokens {prompt} and --max-tokens {params.max_tokens}"
            raise InvalidInput(f"{both} make more than {context}; lower one")
        return Workload({(prompt, params.max_tokens): (args.rows or ROWS) * params.n})
    from flexengine.engine.survey import PromptReader, Refused
    from flexengine.model.tokenizer import load_tokenizer

    refused = Refused()
    with openers.open_rows(args) as rows:
        tokenizer = load_tokenizer(place := opened.source.directory, args.trust_remote_code)
        option = "--template" if args.template is not None else "--chat" if rows.chat else ""
        if option and tokenizer is None:
            remedy = "put its tokenizer files there, or give --prompt-tokens and --rows in place of --input"
            raise InvalidInput(f"{option} makes text, but {place} has no tokenizer that counts its tokens; {remedy}")
        shares = args.prefix_sharing and not opened.lossy.alters_cache
        reader = PromptReader(tokenizer, opened.skeleton, shares, openers.given_ram(args))
        reader.check_chat(rows.chat)
        workload = reader.survey(rows, params, refused)
    if not workload.count and not refused.count:
        raise _NothingToPlan(f"nothing to plan: {args.input} has no rows")
    refused.report(workload, args.input)
    return workload


class _NothingToPlan(Exception):
    """The input has no rows."""


main = program(lambda words: run(parser().parse_args(words)))
