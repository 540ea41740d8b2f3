"""The compiler that torch.compile needs on this machine."""

import os
import shutil

import torch

from plugsft import Machine, Recipe, RecipeError


def ensure_compilable(recipe: Recipe, machine: Machine) -> None:
    """Refuse ZeRO-3, and a machine without a compiler."""
    if machine.strategy == "zero3":
        raise RecipeError(
            "torch.compile cannot compile the hooks that ZeRO-3 adds to each layer; launch with "
            "recipes/accelerate/fsdp2.yaml, or remove [plugins.compile]"
        )
    gpu = torch.cuda.is_available() and recipe.device == "auto"
    language, variable, package = ("C", "CC", "gcc") if gpu else ("C++", "CXX", "g++")
    if not shutil.which(os.environ.get(variable, package)):
        raise RecipeError(
            f"no {language} compiler, which torch.compile needs: apt install {package}, or set "
            f"the environment variable {variable}=..."
        )
