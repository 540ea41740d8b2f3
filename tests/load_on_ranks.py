"""On each rank: load model families sharded, many times, and compare with the files.

accelerate launch --config_file FILE -m load_on_ranks RECIPE FOLDER LOADS REPORT: FOLDER has a
model's folder for each family. The main rank writes what it found into REPORT.
"""

import json
import sys
from pathlib import Path

import torch
from deepspeed import zero
from families import saved_tensors
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed as integration

from plugsft.base.machine import look
from plugsft.model.load import ModelLoad
from plugsft.ranks.connect import connect, silence_libraries
from plugsft.ranks.sharding import shard_frozen_model
from plugsft.registry.load import load as load_recipe


def whole(tensor):
    """Return all of a tensor, wherever it lies; a collective."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_tensor"):
        with zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


def expected(folder):
    """Load with plain transformers, as if there were no ranks."""
    config, integration._hf_deepspeed_config_weak_ref = (
        integration._hf_deepspeed_config_weak_ref,
        None,
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    finally:
        integration._hf_deepspeed_config_weak_ref = config
    return {name: one.detach().clone() for name, one in saved_tensors(model).items()}


def main(recipe, folder, loads, report):
    """Load and compare."""
    silence_libraries()
    accelerator = connect(load_recipe(Path(recipe), [], [])[0], look())
    if accelerator.state.deepspeed_plugin:
        # Known once a model is trained, and here none is.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_batch_size"] = accelerator.num_processes
        config["train_micro_batch_size_per_gpu"] = 1
    found = {}
    for path in sorted(Path(folder).iterdir()):
        wanted, wrong, empty = expected(path), [], True
        for number in range(int(loads)):
            load = ModelLoad(str(path), {"dtype": torch.float32}, empty=True)
            if accelerator.is_fsdp2:
                accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
            model = shard_frozen_model(accelerator, load, load.load_model())
            plain = accelerator.unwrap_model(model)
            empty &= bool(load.files.shapes)
            for name, one in saved_tensors(plain).items():
                same = torch.equal(whole(one).cpu(), wanted[name])
                wrong += [] if same else [f"load {number}: {name}"]
        found[path.name] = {"empty": empty, "wrong": wrong}
    Path(f"{report}-{accelerator.process_index}").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
