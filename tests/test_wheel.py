"""The wheel is enough: built from the sdist, installed alone, used from an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import FULL, ROOT
from packaging.metadata import Metadata
from pages import REFUSED, RUN, in_a_shell, make_place, prepare_for

from plugsft import __version__

BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
SOURCES = ("plugsft", "plugins", "recipes", "tests")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
EXTRAS = {
    "deepspeed",
    "dev",
    "fast",
    "flash",
    "fp8",
    "gs",
    "liger",
    "quantize",
    "ray",
    "s3",
    "trackers",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist from a copy of the clone, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "clone" / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "clone")
    build("build_sdist", folder / "clone", folder)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    build("build_wheel", folder / f"plugsft-{__version__}", folder)
    [wheel] = folder.glob("*.whl")
    return folder / f"plugsft-{__version__}", wheel


def build(kind, source, folder):
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_holds_the_program_its_plugins_and_its_recipes_and_nothing_else(built):
    sdist, wheel = built
    clone = sdist.parent / "clone"
    expected = {f"plugsft/{name}" for name in files_below(clone / "plugsft")}
    for room in ("plugins", "recipes"):
        expected |= {f"plugsft/{room}/{name}" for name in files_below(clone / room)}
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "plugsft/py.typed" in expected and "plugsft/recipes/data/quickstart.jsonl" in expected
    facts = Metadata.from_email(text, validate=True)
    assert str(facts.version) == __version__
    assert not facts.project_urls  # a repository that strangers can open has none yet
    assert {*facts.provides_extra} == EXTRAS
    assert facts.keywords and "Programming Language :: Python :: 3.13" in facts.classifiers
    assert facts.description == (ROOT / "README.md").read_text(encoding="utf8")
    assert not (sdist / "tests").exists()


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Install the wheel in a new environment that borrows the other packages of this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    words = ["--quiet", "--no-deps", "--no-index", str(built[1])]
    subprocess.run([*pip, *words], check=True)
    [packages] = folder.glob("lib/*/site-packages")
    # A folder on the path: the .pth files in it, such as that of the clone, have no effect.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    accelerate = f"#!{folder}/bin/python\nfrom accelerate.commands import accelerate_cli as cli\n"
    (folder / "bin/accelerate").write_text(f"{accelerate}cli.main()\n")
    (folder / "bin/accelerate").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a folder in which the commands of the pages run."""
    return make_place(tmp_path_factory.mktemp("docs"))


def run(installed, place, *words):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [installed / "bin/plugsft", *words], cwd=place, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_an_empty_folder_and_two_commands_lead_to_a_model_that_talks(installed, tmp_path):
    assert run(installed, tmp_path, "--version") == f"plugsft {__version__}\n"
    assert run(installed, tmp_path, "init").startswith("dpo ")
    assert "\n  plugsft check recipes/sft.toml\n" in run(installed, tmp_path, "init", "sft")
    run(installed, tmp_path, "init", "quickstart", "--to", "first")
    told = run(installed, tmp_path / "first", "check", "recipes/quickstart.toml")
    assert told.endswith("\nready: plugsft recipes/quickstart.toml\n"), told
    told = run(installed, tmp_path, "new-plugin", "mine")
    guide = Path(told.splitlines()[-1].removeprefix("explained: "))
    assert guide.is_relative_to(installed) and guide.name == "README.md" and guide.is_file()
    told = run(installed, tmp_path, "quickstart", "train.steps=2", "--to", "first")
    assert "\n> What is plugsft?\n" in told
    assert told.endswith("keep talking: cd first; plugsft chat runs/quickstart\n")
    assert (tmp_path / "first/runs/quickstart/report.html").is_file()
    files = subprocess.run(
        [installed / "bin/python", "-Pc", "import plugsft, plugsft.plugins.lora as l; "
         "print(plugsft.__file__, l.__file__)"], capture_output=True, text=True,
    )  # fmt: skip
    assert all(Path(name).is_relative_to(installed) for name in files.stdout.split())


QUICK = ("plugsft init", "plugsft prepare my.toml", "plugsft schema", "plugsft show my.toml")


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in RUN if FULL or line.startswith(QUICK)])
def test_a_command_of_the_pages_runs_as_pip_installs_it(installed, place, command):
    """Installed compiled, as pip does by default: what lists a folder meets __pycache__."""

    def by_pip(place, command):
        return in_a_shell(place, command, installed / "bin")

    for results in ("runs", "shipped", "tenth-step"):
        shutil.rmtree(place / results, ignore_errors=True)
    prepare_for(command, by_pip, place)
    done = by_pip(place, command)
    assert done.returncode == (2 if command in REFUSED else 0), done.stderr


def test_init_writes_the_launch_files_of_a_compiled_package(installed, tmp_path):
    assert [*installed.glob("lib/*/site-packages/plugsft/recipes/launch/__pycache__")]
    run(installed, tmp_path, "init", "launch")
    written = {path.name for path in (tmp_path / "recipes/launch").iterdir()}
    assert written == {path.name for path in (ROOT / "recipes/launch").iterdir() if path.is_file()}
