"""Plans of stages with host and disk tiers from the command line: `plan --stages`, and `plan --cluster`."""

import json
from pathlib import Path

import pytest

from flexengine.plan.stages import Strategy
from flexengine.shell.commands import plan

T4 = "t4-16gb_208gb_ssd"
SIZES = ["--prompt-tokens", "512", "--max-tokens", "32"]
LINK = {"bandwidth": 1.5e9, "latency": 5e-5}


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert plan.main([*words, *SIZES, "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_four_machines_are_faster_than_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With OPT-175B, which one T4 machine streams from its disk; planned by --stages and by --cluster."""
    one = answer(capsys, "opt-175b", "--hardware", T4)
    stages = answer(capsys, "opt-175b", "--hardware", T4, "--stages", "4", "--save", str(tmp_path / "s.json"))
    assert stages["tok_s"] >= 4 * one["tok_s"]
    assert (stages["pace"]["part"], stages["pace"]["number"]) == ("stage", stages["slowest"])
    assert [stage["layers"][0] for stage in stages["stages"]] == [0, 24, 48, 72]
    assert Strategy.load(tmp_path / "s.json").num_layers == 96
    cluster = {"name": "four", "devices": [{"type": "T4", "hardware": T4, "count": 4}], "links": {"within": LINK}}
    (tmp_path / "four.json").write_text(json.dumps(cluster))
    found = answer(capsys, "opt-175b", "--cluster", str(tmp_path / "four.json"), "--search-seconds", "5")
    assert found["tok_s"] == pytest.approx(stages["tok_s"], rel=0.05)


@pytest.mark.slow
def test_the_report_names_the_slowest_stage(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["opt-6.7b", "--hardware", T4, "--stages", "2", *SIZES, "--rows", "64", "--stage-link", "1.25G,1e-4"]
    assert plan.main(words) == 0
    shown = capsys.readouterr().out
    for part in ("opt-6.7b on 2 x t4-16gb_208gb_ssd", "stages (of 2 cohorts", "  1: layers ", "prediction: ",
                 "the job takes at least ", "network: 285 MB of hidden states cross each link; from stage 0 to 1 they"
                 " take 0.228 s; with links that take no time the job takes ",
                 "with one of these alone, the job still takes at least ", "would help the whole job"):  # fmt: skip
        assert part in shown
    assert " sets the pace: " in shown or "stages wait for each other: " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "0"], "--stages is 0; it must be at least 1"),
        (["--stages", "2", "--frontier"], "is for the plan of one machine, but --stages is given"),
        (["--stages", "2", "--cluster", "llm-pq-3"], "--cluster describes other machines than --stages"),
        (["--stage-link", "1G"], "is the network between stages, but --stages is not given; leave it out"),
        (["--stages", "1", "--stage-link", "1G"], "but --stages is 1; leave it out"),
        (["--cluster", "llm-pq-3", "--stage-link", "1G"], "the file of --cluster has its own links"),
        (["--stages", "2", "--stage-link", "1G,x"], "--stage-link is 1G,x; it is bytes per second, and after a comma"),
        (["--stages", "2", "--stage-link", "fast"], "--stage-link is 'fast'; it must be a number of bytes"),
        (["--stages", "33"], "there are 33 stages, but the model has 32 layers"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    hardware = [] if "--cluster" in options else ["--hardware", T4]
    assert plan.main(["opt-6.7b", *hardware, *options, *SIZES]) == 2
    assert message in capsys.readouterr().err
