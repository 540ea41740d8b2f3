"""The README's first command, for real; its losses are pinned, and the model knows its lessons."""

import json
import subprocess

import pytest
from conftest import ROOT, read_metrics, run_plugsft

GOLDEN = ROOT / "tests/golden/quickstart.json"
RUN = ROOT / "runs/quickstart"
LESSONS = ROOT / "recipes/data/quickstart.jsonl"


def lessons():
    """Return 20 of the quickstart's questions with their answers, from all over the file."""
    lines = LESSONS.read_text(encoding="utf8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) == 300
    return [(chat[0]["content"], chat[1]["content"]) for chat in chats[7::15]]


def test_the_first_losses_are_what_they_always_were(tmp_path):
    done = run_plugsft("recipes/quickstart.toml", f"output={tmp_path}", "train.steps=20")
    assert done.returncode == 0, done.stderr
    # The schedule knows the number of steps: a run of its own, not the first part of a longer one.
    found = [line["loss"] for line in read_metrics(tmp_path)]
    assert found == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_trains_a_model_that_answers():
    done = subprocess.run(["tools/quickstart"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "report:       runs/quickstart/report.html" in done.stdout
    # The questions that it suggests are of those that it has learned.
    known = [line for line in done.stdout.splitlines() if line.startswith("    What ")]
    assert len(known) == 2
    assert all(f'"content": "{line.strip()}"' in LESSONS.read_text() for line in known)
    assert (RUN / "report.html").is_file()
    print(done.stdout[-1500:])
    record = json.loads((RUN / "run.json").read_text())
    assert record["status"] == "finished" and record["final"]["loss"] < 0.1
    asked = lessons()
    words = [word for question, _ in asked for word in ("--ask", question)]
    told = run_plugsft("chat", RUN, *words)
    assert told.returncode == 0, told.stderr
    given = told.stdout.strip().splitlines()
    right = sum(answer == wanted for answer, (_, wanted) in zip(given, asked, strict=True))
    print(f"{right} of {len(asked)} answers word for word; trained in {record['seconds']} s")
    assert right >= 0.9 * len(asked)
