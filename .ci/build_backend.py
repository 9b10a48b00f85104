"""Build backend: setuptools, with a description for package indexes, which show README.md without its neighbours."""

import re
from pathlib import Path

import setuptools
from setuptools.build_meta import _BuildMetaBackend

# Relative images and links, each with what stays of it.
RELATIVE = (
    (r"!\[[^\]]*\]\((?!https?://)[^)]*\)", ""),
    (r'<(?:img|source)\b(?![^>]*\bsrc(?:set)?="https?://)[^>]*>', ""),
    (r"\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?://|mailto:)[^)]*\)", r"\1"),
)


def description(readme: str) -> str:
    """Return a README without relative images; relative links become their text."""
    for pattern, replacement in RELATIVE:
        readme = re.sub(pattern, replacement, readme)
    return readme


class _Backend(_BuildMetaBackend):
    """The documented way to extend setuptools' backend: all else is in setup.cfg."""

    def run_setup(self, setup_script: str = "setup.py") -> None:
        setuptools.setup(long_description=description(Path("README.md").read_text(encoding="utf-8")))


_backend = _Backend()
build_sdist = _backend.build_sdist
build_wheel = _backend.build_wheel
build_editable = _backend.build_editable
get_requires_for_build_sdist = _backend.get_requires_for_build_sdist
get_requires_for_build_wheel = _backend.get_requires_for_build_wheel
get_requires_for_build_editable = _backend.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _backend.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _backend.prepare_metadata_for_build_editable
