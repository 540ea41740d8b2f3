"""tools/bench/gpu.py without a GPU: a dry run that is killed and goes on, and TRL's settings."""

import ast
import importlib
import json
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, only_full
from transformers import AutoModelForCausalLM

BENCH = ROOT / "tools/bench"


@pytest.fixture
def bench(monkeypatch):
    """Give a function that imports a module of the bench."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("name", ["0.6b-lora", "1b-full", "8b-full"])
def test_weights_are_counted_as_the_model_has_them(bench, name):
    cases = bench("gpu_cases")
    shape = cases.CASES[name].shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    model.tie_weights()
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.ndim > 1}
    if not shape.tied:
        matrices.pop(id(model.get_input_embeddings().weight))
    assert shape.multiplied == sum(matrices.values())


def test_operations_are_six_or_four_a_weight_and_those_of_attention(bench):
    cases = bench("gpu_cases")
    shape = cases.Shape("llama", 8, 16, 3, 2, 1, 4, 10, tied=True)
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 10
    # Each layer has two products of 8 numbers for every pair, of 2 operations, 3 times.
    pairs = (20**2 + 40**2) / 2 / 60
    attention = 3 * 2 * 8 * 2 * 3 * pairs
    lengths = np.array([20, 40])
    assert shape.multiplied == weights
    assert cases.flops_per_token(shape, lengths, lora=False) == pytest.approx(
        6 * weights + attention
    )
    assert cases.flops_per_token(shape, lengths, lora=True) == pytest.approx(
        4 * weights + attention
    )
    half = cases.flops_per_token(shape, lengths, lora=False, head=0.5)
    assert half == pytest.approx(6 * (weights - 40) + attention)


def test_the_names_of_contenders_are_read(bench):
    cases = bench("gpu_cases")
    for case in cases.CASES.values():
        for name in case.contenders:
            contender = cases.Contender.parse(name)
            packed = contender.trainer in ("plugsft", "trl") or "bfd_packing" in contender.plugins
            assert (contender.rows >= case.longest) == packed, name
    contender = cases.Contender.parse("plugsft+compile+float32@16k")
    assert contender.plugins == [*cases.PACKED, "compile"] and contender.rows == 16_384
    with pytest.raises(SystemExit, match="no contender is named 'axolotl@4k'"):
        cases.Contender.parse("axolotl@4k")


def test_a_first_step_that_differs_is_reported(bench, tmp_path):
    train, cases, process = bench("gpu_train"), bench("gpu_cases"), bench("gpu_process")
    results = process.Results(tmp_path / "1b-full.json", {"gpu": "none", "dry_run": True})
    for name, loss, norm in (("trl@4k", 2, 1), ("plain", 2.001, 1.1), ("plugsft@16k", 3, 1)):
        results.add(name, {"loss": loss, "grad_norm": norm})
    results.add("trl@16k", {"reason": "out of memory"})
    full = train.compare_first_steps(cases.CASES["1b-full"], results)
    # Rows of 16k have other chats in a step.
    assert full == ["plain: grad_norm 1.1, and 1 of trl@4k"]
    assert train.compare_first_steps(cases.CASES["0.6b-lora"], results) == []


def test_mfu_is_of_gpus_whose_peak_is_known(bench):
    peak_of = bench("gpu").peak_flops
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA RTX 3090", ""):
        assert peak_of(other) is None


def test_results_of_another_gpu_are_refused(bench, tmp_path):
    process = bench("gpu_process")
    path = tmp_path / "probe.json"
    process.Results(path, {"gpu": "NVIDIA H100"}).add("versions", {"value": 1})
    with pytest.raises(SystemExit, match="is of NVIDIA H100, not of NVIDIA H200: set another"):
        process.Results(path, {"gpu": "NVIDIA H200"})


def test_a_failed_check_drops_its_kernel_and_not_the_run(bench, tmp_path):
    gpu, train, process = bench("gpu"), bench("gpu_train"), bench("gpu_process")
    probe = process.Results(tmp_path / "probe.json", {"gpu": "none"})
    probe.add("check attention torch", {"value": [{"failed": True}, {"failed": False}]})
    probe.add("check liger", {"value": [{"failed": True}]})
    probe.add("check loss torch", {"value": [{"failed": False}]})
    probe.add("check rows", {"reason": "signal 11"})
    failed = gpu.failed_kernels(tmp_path)
    assert failed == ["attention torch", "liger"]
    run = train.Bench.__new__(train.Bench)
    run.case, run.cpu, run.folder, run.failed = train_case(bench), True, tmp_path, failed
    recipe = run.recipe("run", bench("gpu_cases").Contender.parse("plugsft@256"), {})
    assert '[plugins.flash_attention]\nkernel = "sdpa"' in recipe.read_text()
    assert "[plugins.fused_loss]\n\n" in recipe.read_text() + "\n\n"
    run.ensure_checked(bench("gpu_cases").Contender.parse("plugsft@256"))
    with pytest.raises(process.Failed, match="the check of liger failed"):
        run.ensure_checked(bench("gpu_cases").Contender.parse("plugsft+liger@256"))


def train_case(bench):
    """Return the tiny case of full fine-tuning."""
    cases = bench("gpu_cases")
    return cases.shrink(cases.CASES["1b-full"])


@pytest.fixture
def trl_run(bench, tmp_path):
    """Give a function that runs TRL's first step on packed rows, with an attention."""
    pytest.importorskip("trl")
    gpu_trl, cases, shared = bench("gpu_trl"), bench("gpu_cases"), bench("shared")
    case = train_case(bench)
    cases.make_model({"case": asdict(case), "folder": str(tmp_path)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for parameter in model.parameters():
        parameter.data *= 4  # otherwise, attention hardly changes the loss
    model.save_pretrained(tmp_path / "model")
    lengths = shared.draw_lengths(12, 3.0, 0.7, 6, 60)
    tokens = shared.write_tokens(tmp_path / "tokens", lengths, 1, vocab=900)

    def run(attention, lora=False):
        contender = cases.Contender.parse("trl@256")
        settings, options, _ = gpu_trl.choose_settings(case, contender, True, 30.0)
        options["attn_implementation"] = attention
        torch.manual_seed(0)
        trainer, _ = gpu_trl.make_trainer(
            tmp_path, tokens, settings | {"max_steps": 1}, options, lora
        )
        return gpu_trl.run_first_step(trainer, tokens, 12)

    return run


@pytest.mark.filterwarnings("ignore")  # TRL's and peft's
@pytest.mark.parametrize("lora", [False, True])
def test_trl_with_plugsfts_attention_learns_what_plain_trl_does(bench, trl_run, monkeypatch, lora):
    """The first loss and gradient norm of packed documents are those of transformers' mask."""
    gpu_trl = bench("gpu_trl")
    assert gpu_trl.choose_attention(cpu=True) == gpu_trl.ATTENTION
    expected = trl_run("sdpa", lora)
    assert trl_run(gpu_trl.ATTENTION, lora) == pytest.approx(expected, rel=1e-5)

    attend = gpu_trl.attend_on_cpu

    def attend_to_all(*inputs, cu_seq_lens_q, **options):
        return attend(*inputs, cu_seq_lens_q=cu_seq_lens_q[[0, -1]], **options)

    monkeypatch.setattr(gpu_trl, "attend_on_cpu", attend_to_all)
    loss, norm = trl_run(gpu_trl.ATTENTION, lora)
    assert abs(loss / expected[0] - 1) > 1e-3 and abs(norm / expected[1] - 1) > 1e-3


def test_attention_without_bounds_is_refused(bench):
    gpu_trl = bench("gpu_trl")
    for attend in (gpu_trl.attend, gpu_trl.attend_on_cpu):
        with pytest.raises(ValueError, match="TRL gave no cu_seq_lens_q"):
            attend(None, *[torch.zeros(1, 1, 2, 8)] * 3, None)


ITEMS = """
import json, os, sys, time
arguments = json.loads(sys.argv[2])
missing = [name for name in ("fine", "hangs", "dies", "last") if name not in arguments["done"]]
with open(arguments["lines"], "a", buffering=1) as file:
    for name in missing:
        file.write(json.dumps({"name": name}) + "\\n")
        print("the item", name, flush=True)
        if name == "hangs":
            time.sleep(600)
        if name == "dies":
            os.abort()
        file.write(json.dumps({"name": name, "result": {"value": 1}}) + "\\n")
    file.write(json.dumps({"finished": True}) + "\\n")
"""


def test_an_item_that_hangs_or_dies_does_not_end_the_others(bench, tmp_path, monkeypatch):
    gpu, process = bench("gpu"), bench("gpu_process")
    (tmp_path / "items.py").write_text(ITEMS)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "items.py"))
    monkeypatch.setattr(gpu, "ITEM_LIMIT", 3.0)
    results = process.Results(tmp_path / "probe.json", {"gpu": "none"})
    options = SimpleNamespace(work=tmp_path, end=time.monotonic() + 300)
    gpu.run_all_items("probe", options, results)
    assert [*results.all] == ["fine", "hangs", "dies", "last"]
    assert results.all["hangs"][0]["reason"] == "took more than 3 s"
    assert results.all["dies"][0]["reason"] == "signal 6: the item dies"
    assert results.all["last"][0]["value"] == 1
    options.end = time.monotonic() - 1
    results = process.Results(tmp_path / "sync.json", {"gpu": "none"})
    with pytest.raises(process.TimeUp):
        gpu.run_all_items("sync", options, results)
    assert "hangs" not in results.all  # it runs again in the next call


def test_warnings_of_waits_are_counted_by_step_and_place(bench, tmp_path):
    """As on a GPU, where CUDA warns."""
    counted = bench("gpu_probe").Warnings(tmp_path / "metrics.jsonl")
    for step in range(6):
        for _ in range(2):
            counted.add("called a synchronizing CUDA operation")
        counted.add("something else")
        with counted.metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    [(place, count)] = counted.per_step().items()
    assert count == 2 and place.startswith("tests/test_gpu_bench.py:")


def start(out, work, *words):
    """Start a dry run."""
    command = [sys.executable, BENCH / "gpu.py", "--dry-run", "--out", out, "--work", work]
    command += ["--seconds", "2000"]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read(out):
    """Return the results of each phase."""
    return {path.stem: json.loads(path.read_text())["results"] for path in out.glob("*.json")}


def kill_and_go_on(out, work, phases, enough):
    """Kill a dry run once it has enough results, go on; return the results before and after."""
    words = ["--phases", phases, "--rounds", "1"]
    process = start(out, work, *words)
    while process.poll() is None and sum(map(len, read(out).values())) < enough:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = read(out)
    process = start(out, work, *words)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    after = read(out)
    assert sum(map(len, before.values())) < sum(map(len, after.values()))
    for phase, results in before.items():
        for name, rounds in results.items():
            assert after[phase][name] == rounds, name  # with the time at which it was measured
            assert f"\n{name}: " not in output.partition(f"== {phase}")[2].partition("\n\n")[0]
    assert all(len(rounds) == 1 for results in after.values() for rounds in results.values())
    return after, output


@only_full
def test_the_probe_goes_on_after_a_kill(tmp_path):
    after, _ = kill_and_go_on(tmp_path / "out", tmp_path / "work", "probe", 4)
    probe = after["probe"]
    assert [name for name, rounds in probe.items() if "reason" in rounds[0]] == []
    checks = [
        part for name in probe if name.startswith("check") for part in probe[name][0]["value"]
    ]
    assert len([check for check in checks if check["error"] is not None]) >= 12
    assert not any(check["failed"] for check in checks)
    assert all(check["error"] is not None or check["reason"] for check in checks)
    assert probe["versions"][0]["value"]["torch"] == torch.__version__


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_finds_what_it_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plugsft"):
            exec(ast.unparse(node), {})


@only_full
@pytest.mark.timeout(2400)
def test_a_dry_run_of_all_phases_goes_on_after_a_kill(tmp_path):
    work = tmp_path / "work"
    (work / "dry/1b/half-made").mkdir(parents=True)
    phases = "sync,0.6b-lora,1b-full,times,0.6b-dpo"
    after, output = kill_and_go_on(tmp_path / "out", work, phases, 5)
    assert not (work / "dry/1b/half-made").exists()
    reasons = {
        name: rounds[0].get("reason", "")
        for case in ("0.6b-lora", "1b-full")
        for name, rounds in after[case].items()
    }
    assert [name for name, reason in reasons.items() if reason] == [
        "plugsft+low_memory_adam@256", "trl+liger@256"
    ]  # fmt: skip
    assert reasons["plugsft+low_memory_adam@256"].startswith("refused: ")
    assert reasons["trl+liger@256"].startswith("exit code 1: RuntimeError: 0 active drivers")
    for case, name in (("0.6b-lora", "plugsft@256"), ("1b-full", "plugsft+float32@256")):
        summary = json.loads((tmp_path / f"out/{case}.json").read_text())["summary"]
        assert summary["first_step_differs"] == []
        line = summary["contenders"][name]
        assert line["mfu"] is None and line["tokens_per_second"] > 0
        assert line["against_trl_best"] > 0 < line["against_trl_same_row"]
    [traces] = [
        rounds[0]["traces"] for name, rounds in after["0.6b-lora"].items() if "prof" in name
    ]
    assert len(traces) == 2 and all((tmp_path / "out" / name).stat().st_size for name in traces)
    waits = after["sync"]["eager"][0]["value"]["waits in a step"]
    assert waits and sum(waits.values()) <= 1
    assert after["sync"]["compiled"][0]["value"]["stats"]
    timings = [part for rounds in after["times"].values() for part in rounds[0]["value"]]
    measured = {timing["kernel"] for timing in timings if "seconds" in timing}
    assert measured == {"sdpa", "plain", "torch", "trl"}
    trl, shared = (after["0.6b-dpo"][name][0] for name in ("trl", "shared+reference"))
    assert shared["positions"] < trl["positions"] and trl["step"] > 0 < shared["pass"]
    assert "FIRST STEP DIFFERS" not in output and "MFU n/a" in output


@only_full
def test_a_dry_run_of_the_recipe_for_a_t4_trains_in_float16(tmp_path):
    words = [BENCH / "gpu_t4.py", "--dry-run", "--steps=2", "--out", tmp_path / "t4.json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "t4.json").read_text())
    assert len(report["steps"]) == 2 and report["steps"][-1]["loss_scale"] > 1
    assert "computed in float16" in report["precision"] and "uint8" in report["precision"]
    assert 1 < report["forecast_gib"] < 2 and "reserved" in report["forecast"]


@only_full
def test_the_pack_has_what_a_bare_machine_lacks(tmp_path):
    """It takes wheels from the registry."""
    folder = tmp_path / "pack"
    process = subprocess.run(
        [sys.executable, BENCH / "gpu_pack", folder], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"python3 {folder.name}/bench/gpu.py --out /tmp/gpu" in process.stdout
    wheels = {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}
    assert {"plugsft", "trl", "liger_kernel", "datasets", "pydantic", "tomli_w"} <= {*wheels}
    assert "cp312" in wheels["pydantic_core"].name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 60e6
    with zipfile.ZipFile(wheels["plugsft"]) as wheel:
        assert {"plugsft/loop.py", "plugsft/plugins/lora/__init__.py"} <= {*wheel.namelist()}
    assert (folder / "bench/gpu.py").exists() and (folder / "bench/GPU.md").exists()
