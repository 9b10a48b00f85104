"""Options of fleets: those that are refused before anything is started."""

from pathlib import Path

import pytest

from flexengine.shell.commands.main import main


@pytest.mark.parametrize(("words", "environment", "why"), [
    (["--actors", "3"], {}, "--actors is 3, but it is an option of fleets; give --ray ADDRESS"),
    (["--shard-rows", "3"], {}, "--shard-rows is 3, but it is an option of fleets"),
    (["--ray", "local", "--actors", "0"], {}, "--actors is 0; it must be at least 1"),
    (["--ray", "local", "--shard-rows", "-2"], {}, "--shard-rows is -2; it must be at least 1"),
    (["--ray", "local", "--dry-run"], {}, "--dry-run shows one engine, and has no effect with --ray"),
    (["--ray", "local", "--trace", "t.json"], {}, "--trace shows one engine"),
    (["--ray", "local", "--report", "r.html"], {}, "--report shows one engine"),
    (["--ray", "local", "--engines", "2"], {}, "--engines is 2, but --ray has engines of its own; leave out one"),
    (["--ray", "local", "--interface", "eth0"], {}, "--interface is eth0, but actors of one process need none"),
    (["--ray", "local"], {"RANK": "0", "WORLD_SIZE": "2"}, "--ray is local, but WORLD_SIZE is 2"),
    (["--ray", "local", "--stages", "0"], {}, "--stages is 0; it must be at least 1"),
])  # fmt: skip
def test_refusals(
    words: list[str], environment: dict[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "in.jsonl", "-o", "out.jsonl", *words]) == 2
    assert why in capsys.readouterr().err
    assert not Path("out.jsonl.journal").exists()
