"""plugsft convert: what axolotl and LLaMA-Factory make of configurations equals their recipes."""

import json
from itertools import pairwise

import pytest
import yaml
from conftest import only_full, write_jsonl
from other_tools import AXOLOTL, FACTORY, INFO, MADE, save_model
from transformers import AutoModelForCausalLM

from plugsft.batches.defaults import BatchDefaults
from plugsft.commands.converting.convert_file import convert_file, convert_settings
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.model.schedule import ScheduleDefaults
from plugsft.plugins.lora.targets import choose_modules
from plugsft.registry.load import load

THEIRS = json.loads(MADE.read_text("utf8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of the tiny Llama, whose template writes the rows."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


def write_axolotl(folder, model, name):
    [rows], settings = AXOLOTL[name]
    write_jsonl(folder / "rows.jsonl", rows)
    datasets = [{"path": str(folder / "rows.jsonl"), "ds_type": "json", **settings["datasets"][0]}]
    return {
        **settings,
        "base_model": str(model),
        "output_dir": str(folder / "run"),
        "datasets": datasets,
    }


def write_factory(folder, model, name):
    sources, settings = FACTORY[name]
    info = {}
    for number, (rows, entry) in enumerate(zip(sources, INFO[name], strict=True)):
        write_jsonl(folder / f"{number}.jsonl", rows)
        info[f"rows{number}"] = {"file_name": f"{number}.jsonl", **entry}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return {
        **settings,
        "model_name_or_path": str(model),
        "output_dir": str(folder / "run"),
        "dataset": ", ".join(info),
        "dataset_dir": str(folder),
        "cutoff_len": 2048,
    }


def converted(folder, model, name):
    """Return the recipe of a configuration, and its plugins."""
    write = write_axolotl if name in AXOLOTL else write_factory
    path = folder / "other.yaml"
    path.write_text(yaml.safe_dump(write(folder, model, name)))
    conversion = convert_file(path, folder / "recipe.toml", "", "", 1)
    four = convert_settings(path, "", "", 4).lines["train.batch_size"]
    assert conversion.left == {}
    assert four.value == 4 * conversion.lines["train.batch_size"].value
    return load(folder / "recipe.toml")


@only_full
@pytest.mark.parametrize("name", [*AXOLOTL, *FACTORY])
def test_masks_rates_batches_and_modules_equal_those_of_the_tool(tmp_path, model, name):
    recipe, active = converted(tmp_path, model, name)
    settings = (AXOLOTL if name in AXOLOTL else FACTORY)[name][1]

    micro = settings.get("micro_batch_size", settings.get("per_device_train_batch_size"))
    examples = micro * settings["gradient_accumulation_steps"]
    if settings.get("sample_packing"):
        # MultipackBatchSampler fills one row of micro_batch_size x sequence_len tokens.
        assert recipe.plugins["bfd_packing"]["capacity"] == micro * settings["sequence_len"]
        assert recipe.train.batch_size == settings["gradient_accumulation_steps"]
    else:
        assert (recipe.train.batch_size, recipe.train.micro_batch) == (examples, micro)

    assert recipe.train.learning_rate == float(settings["learning_rate"])
    expected = THEIRS[name]["factors"]
    factor = ScheduleDefaults().schedule(recipe.train, len(expected))
    assert [factor(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-12)

    # No token is before the first, so nothing predicts it.
    rows = sorted((ids, f"0{bits[1:]}") for ids, bits in THEIRS[name]["rows"])
    assert tokens_of(recipe, active) == rows
    if "lora" in recipe.plugins:
        modules_are(recipe, active, model, settings)


def tokens_of(recipe, active):
    """Return the ids and the mask of each example, in the form of other_tools.json."""
    active.attach(DataDefaults(recipe.folder), BatchDefaults())
    tokens = prepare(recipe, active).tokens
    found = []
    for number in range(len(tokens)):
        ids, mask = (some.tolist() for some in tokens.example(number))
        cuts = [0, *tokens.sequences([number])[0].cumsum().tolist()]
        for start, stop in pairwise(cuts):
            bits = "".join(str(int(trained)) for trained in mask[start:stop])
            found.append((" ".join(map(str, ids[start:stop])), bits))
    return sorted(found)


def modules_are(recipe, active, model, settings):
    """Compare the adapted modules with those that the tool finds."""
    tool = "axolotl" if "adapter" in settings else "LLaMA-Factory"
    named = settings.get("lora_target_modules") or settings.get("lora_target", "").split(",")
    linear = THEIRS[f"linear layers of {tool}"]
    wanted = linear if named in (["all"], [""]) else named
    targets, _ = choose_modules(active.plugins["lora"], AutoModelForCausalLM.from_pretrained(model))
    assert sorted({target.rpartition(".")[2] for target in targets}) == sorted(wanted)
    options = recipe.plugins["lora"]
    rank = settings.get("lora_r", settings.get("lora_rank"))
    assert (options["r"], options["alpha"]) == (rank, settings.get("lora_alpha", 2 * rank))
