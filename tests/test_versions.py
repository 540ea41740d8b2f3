"""The versions that pyproject.toml allows are those that tests run."""

import os
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from conftest import OLDEST, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def requirements() -> Iterator[Requirement]:
    """Yield what the core needs, and the extras that tools/test installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    [names] = re.findall(r"^extras=dev,(\S+)$", (ROOT / "tools/test").read_text("utf8"), re.M)
    extras = [project["optional-dependencies"][name] for name in names.split(",")]
    yield from map(Requirement, sum(extras, project["dependencies"]))


def pins(name: str) -> dict[str, Version]:
    """Return the versions that a file of tools/ pins."""
    rows = (line.split("==") for line in (ROOT / "tools" / name).read_text("utf8").split())
    return {canonicalize_name(package): Version(text) for package, text in rows}


def test_the_oldest_versions_that_are_allowed_are_pinned_for_the_second_environment():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    for need in requirements():
        name, [floor] = canonicalize_name(need.name), need.specifier
        assert (floor.operator, Version(floor.version)) == (">=", oldest[name]), name
        assert newest[name] >= oldest[name]
    assert newest["torch"] > oldest["torch"] and newest["transformers"] > oldest["transformers"]


def test_the_files_that_run_again_exist():
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    assert names >= OLDEST


@pytest.mark.skipif(os.environ.get("PLUGSFT_OLDEST") != "1", reason="of the second environment")
def test_the_second_environment_has_the_oldest_versions():
    oldest = pins("constraints-oldest.txt")
    for need in requirements():
        # Without what names a build, as in 2.11.0+cpu.
        installed = Version(version(need.name)).public
        assert Version(installed) == oldest[canonicalize_name(need.name)]
