"""The README's first command: its losses are pinned, and the model answers."""

import json
import re
import subprocess

import pytest
from conftest import FULL, ROOT, read_metrics, run_plugsft

GOLDEN = ROOT / "tests/golden/quickstart.json"
RUN = ROOT / "runs/quickstart"
LESSONS = ROOT / "recipes/data/quickstart.jsonl"
PREFERENCES = ROOT / "recipes/data/quickstart_preferences.jsonl"


def lessons():
    """Return 20 of the quickstart's questions with their answers, from all over the file."""
    lines = LESSONS.read_text(encoding="utf8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    assert len(chats) == 300
    return [(chat[0]["content"], chat[1]["content"]) for chat in chats[7::15]]


SHORT = ["train.batch_size=16", "train.micro_batch=16", "train.learning_rate=5e-3"]
SHORT += ["train.steps=20"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_trains_a_model_that_answers_and_learns_what_is_preferred(tmp_path):
    short = [] if FULL else SHORT  # of 1,500 steps, after which it answers
    done = subprocess.run(["tools/quickstart", *short], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "report:       runs/quickstart/report.html" in done.stdout
    # The questions that it suggests are of those that it has learned.
    known = [line for line in done.stdout.splitlines() if line.startswith("    What ")]
    assert len(known) == 2
    assert all(f'"content": "{line.strip()}"' in LESSONS.read_text() for line in known)
    assert (RUN / "report.html").is_file()
    print(done.stdout[-1500:])
    record = json.loads((RUN / "run.json").read_text())
    assert record["status"] == "completed"
    if not FULL:
        losses = [line["loss"] for line in read_metrics(RUN)]
        assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)
        assert answers(RUN, [lessons()[0][0]])
        return
    assert record["final"]["loss"] < 0.1
    asked = lessons()
    given = answers(RUN, [question for question, _ in asked])
    right = sum(answer == wanted for answer, (_, wanted) in zip(given, asked, strict=True))
    print(f"{right} of {len(asked)} answers word for word; trained in {record['seconds']} s")
    assert right >= 0.9 * len(asked)
    learns_to_be_brief(tmp_path / "brief")


def answers(run, questions):
    """Ask a run's model; return what it says."""
    words = [word for question in questions for word in ("--ask", question)]
    told = run_plugsft("chat", run, *words)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip().splitlines()


def learns_to_be_brief(run):
    """Go on from the quickstart's model with preferences, and see what becomes of its answers."""
    done = run_plugsft("recipes/quickstart_dpo.toml", f"output={run}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 1/72  .*  accuracy 0\.000  margin -?0\.000", done.stdout)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert evaluated[-1]["eval_accuracy"] > 0.9
    page = (run / "report.html").read_text(encoding="utf8")
    assert "; eval accuracy " in page and '"eval_reward_chosen"' in page
    # No pair asks these questions, of which the quickstart's lessons have two sentences.
    pairs = [json.loads(line) for line in PREFERENCES.read_text(encoding="utf8").splitlines()]
    asked = {pair["prompt"][-1]["content"] for pair in pairs[:192]}
    wanted = {
        pair["prompt"][0]["content"]: (pair["chosen"][0]["content"], pair["rejected"][0]["content"])
        for pair in pairs[192:]
        if len(pair["prompt"]) == 1
        and json.dumps(pair["rejected"][0]["content"]) in LESSONS.read_text(encoding="utf8")
    }
    assert len(wanted) >= 10 and not asked & set(wanted)
    before, after = (zip(answers(one, wanted), wanted.values(), strict=True) for one in (RUN, run))
    whole = sum(said == rejected for said, (_, rejected) in before)
    brief = sum(said == chosen for said, (chosen, _) in after)
    print(f"of {len(wanted)} answers {whole} were whole before, {brief} are brief; {evaluated[-1]}")
    assert whole >= 0.8 * len(wanted) and brief >= 0.6 * len(wanted)
