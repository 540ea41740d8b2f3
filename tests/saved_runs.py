"""Tiny runs with checkpoints: trained, resumed, and read back."""

import json
import shutil

import torch
from conftest import chats, run_plugsft, tiny_tables, write_recipe
from safetensors import safe_open
from safetensors.torch import load_file

from plugsft.base.atomic import list_checkpoints, parse_step


def write(folder, name="recipe", **tables):
    """Write a tiny recipe with these tables, whose output is `folder / name`."""
    tables = {"output": str(folder / name)} | tables
    return write_recipe(folder / f"{name}.toml", tiny_tables(folder, chats(24)) | tables)


def train(folder, name="recipe", **tables):
    """Train a tiny recipe with these tables; return the run's folder."""
    result = run_plugsft(write(folder, name, **tables))
    assert result.returncode == 0, result.stderr
    return folder / name


def forget(run, after):
    """Remove the model, and the checkpoints after a step."""
    for folder in list_checkpoints(run / "checkpoints"):
        if parse_step(folder) > after:
            shutil.rmtree(folder)
    shutil.rmtree(run / "model")


def resume(run, recipe, after):
    """Go on in one process, after a step."""
    forget(run, after)
    result = run_plugsft(recipe, f"output={run}", "--resume")
    assert result.returncode == 0, result.stderr


def checkpoint(run, step):
    return run / f"checkpoints/step-{step:06d}"


def read(folder, kind="model"):
    """Read the tensors of a kind from a checkpoint, of any number of ranks."""
    parts, shapes = {}, {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name, (start, shape) in json.loads(file.metadata()["places"]).items():
                parts.setdefault(name, []).append((start, file.get_tensor(name)))
                shapes[name] = shape
    return {
        name.removeprefix(f"{kind}/"): torch.cat([part for _, part in sorted(parts[name])])
        .float()
        .view(shape)
        for name, shape in shapes.items()
        if name.startswith(f"{kind}/")
    }


def model_of(run):
    return load_file(run / "model/model.safetensors")


def initial_weights(run):
    [folder] = (run / "scratch").glob("model-*")
    return load_file(folder / "model.safetensors")


def evaluations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def assert_equal(tensors, expected):
    """Compare every bit."""
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def assert_close(tensors, expected, atol=1e-7):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name].double(), tensor.double(), rtol=2e-7, atol=atol)
