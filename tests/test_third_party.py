"""A third party's plugin is found, checked and run like a bundled one."""

import tomllib
from pathlib import Path

import pyarrow as pa
import pytest
from author import install, run_fresh, write_plugin
from conftest import must_succeed, only_full, read_metrics, read_record, run_plugsft
from transformers import AutoTokenizer

SHOUT = Path(__file__).parent / "third_party"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where pip installed plugsft-shout."""
    return install(SHOUT, target=tmp_path_factory.mktemp("pip") / "site")


@pytest.fixture
def site(installed, monkeypatch):
    """The same, and every process that a test starts looks there."""
    monkeypatch.syspath_prepend(installed)
    return installed


def texts(run):
    """Read what a run was trained on, back from its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    [shard] = (run / "tokens").glob("*/data-*.arrow")
    with pa.OSFile(str(shard)) as file:
        return tokenizer.batch_decode(pa.ipc.open_stream(file).read_all()["input_ids"].to_pylist())


def test_it_trains_with_its_options(site, tiny, tmp_path):
    options = {"times": 3, "mark": "?"}
    recipe = tiny(plugins={"shout": options})
    result = run_fresh(site, "plugsft", recipe, "plugins.shout.times=2")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    trained = texts(run)
    turns = sum(text.count("??<") for text in trained)
    assert turns == sum(text.count("<|im_start|>assistant") for text in trained) >= 24
    assert "???" not in "".join(trained)
    [record] = read_record(run)["plugins"]
    assert record["summary"] == "every assistant turn shouted, with '??'"
    assert record["origin"] == "plugsft-shout 1.2.3"
    assert record["options"] == {"mark": "?", "times": 2, "who": "assistant"}
    assert "plugin shout: every assistant turn" in result.stdout
    # What was resolved is a recipe that runs again, and knows the plugin's options.
    tables = tomllib.loads((run / "recipe.toml").read_text())
    assert tables["plugins"] == {"shout": record["options"]}
    must_succeed(run / "recipe.toml", f"output={tmp_path / 'again'}")
    losses = [[step["loss"] for step in read_metrics(tmp_path / at)] for at in ("run", "again")]
    assert losses[0] == losses[1]


def test_it_is_listed_with_its_distribution(site):
    result = must_succeed("plugins")
    [line] = [line for line in result.stdout.splitlines() if line.split()[:1] == ["shout"]]
    assert "plugsft-shout 1.2.3" in line and "Make the assistant shout" in line
    assert "length_group" in result.stdout and "echo_chamber" in result.stdout


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        ({"shout": {"tims": 2}}, ["plugins.shout.tims: ", "did you mean 'times'?"]),
        ({"shout": {"times": "two"}}, ["plugins.shout.times: given 'two'"]),
        ({"shout": {"who": "asistant"}}, ["plugins.shout.who: ", "did you mean 'assistant'?"]),
        ({"length_group": {"tokens": 7}}, ["plugins.length_group.tokens: unknown key"]),
        ({"shoot": {}}, ["plugins.shoot: unknown plugin", "did you mean 'shout'?"]),
        ({"shout": {"times": -1}}, ["plugins.shout: times: given -1"]),
        ({"echo_chamber": {}}, ["plugins.echo_chamber: ", "pip install plugsft_no_such_package"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(site, tiny, tmp_path, plugins, said):
    result = run_plugsft(tiny(plugins=plugins))
    assert result.returncode == 2, result.stderr
    [line] = result.stderr.splitlines()
    for words in said:
        assert words in line
    assert not (tmp_path / "run").exists()


def test_a_plugin_that_is_not_installed_is_refused_with_a_list_of_plugins(tiny):
    result = run_plugsft(tiny(plugins={"shout": {}}))
    assert result.returncode == 2
    assert "plugins.shout: unknown plugin" in result.stderr and "length_group" in result.stderr


def test_a_name_that_a_bundled_plugin_has_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_plugin(tmp_path / "site", "length_group", ""))
    result = run_plugsft(tiny())
    assert result.returncode == 2
    assert (
        "two plugins are named 'length_group': bundled and dist-length_group 1.0" in result.stderr
    )


def test_a_name_that_two_distributions_have_is_an_error(site, tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_plugin(tmp_path / "other", "shout", ""))
    result = run_plugsft(tiny())
    assert result.returncode == 2
    assert "two plugins are named 'shout'" in result.stderr
    assert "plugsft-shout 1.2.3" in result.stderr and "dist-shout 1.0" in result.stderr


def test_the_name_of_the_core_is_an_error(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_plugin(tmp_path / "site", "core", ""))
    result = run_plugsft(tiny())
    assert result.returncode == 2
    assert "dist-core 1.0: a plugin cannot be named 'core'" in result.stderr


KINDS = {"callback": 3, "format": 3, "loss": 3, "optimizer": 3}
"""Kind of plugin -> tests that its skeleton has."""


@only_full
@pytest.mark.slow
def test_new_plugins_of_every_kind_pass_their_own_tests(tmp_path):
    folders = []
    for kind in KINDS:
        folders.append(tmp_path / f"plugsft-loud-{kind}")
        result = must_succeed("new-plugin", f"loud_{kind}", "--kind", kind, "--folder", tmp_path)
        for command in (f"cd {folders[-1]}", "pip install -e '.[dev]'", "pytest"):
            assert command in result.stdout
    site = install(*folders, target=tmp_path / "site")
    tested = run_fresh(site, "pytest", "-q", "-W", "error", *folders, cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout
    assert f"{sum(KINDS.values())} passed" in tested.stdout
    # Installed, its name is taken.
    again = run_fresh(site, "plugsft", "new-plugin", "loud_loss")
    assert again.returncode == 2 and "plugsft-loud-loss 0.1.0" in again.stderr


def test_without_a_kind_it_is_a_callback(tmp_path):
    for options in [("mine",), ("mine", "--kind", "callback", "--folder", tmp_path / "b")]:
        must_succeed("new-plugin", "--folder", tmp_path / "a", *options)
    first, second = (
        {path.name: path.read_text() for path in (tmp_path / name / "plugsft-mine").iterdir()}
        for name in "ab"
    )
    assert first == second and len(first) == 4
    assert 'description = "Stop a run when its average loss' in first["pyproject.toml"]


def test_a_kind_that_there_is_not_is_refused(tmp_path):
    result = run_plugsft("new-plugin", "mine", "--kind", "los", "--folder", tmp_path)
    assert result.returncode == 2 and "'--kind'" in result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["Loud", "loud-loss", "1st", "class", "core1", "loud_", "length_group"]
)
def test_a_name_that_cannot_be_is_refused(name, tmp_path):
    result = run_plugsft("new-plugin", "--folder", tmp_path, "--", name)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: '{name}': ")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    folder = tmp_path / "plugsft-loud-loss"
    folder.mkdir()
    result = run_plugsft("new-plugin", "loud_loss", "--folder", tmp_path)
    assert result.returncode == 2 and f"{folder} exists already" in result.stderr
    assert not any(folder.iterdir())
