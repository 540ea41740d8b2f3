"""One tiny run, from the command line to the model."""

from conftest import read_metrics, run_plugsft


def test_a_tiny_run_trains_and_leaves_everything_behind(tiny, tmp_path):
    done = run_plugsft(tiny(train={"epochs": 3}))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    losses = [line["loss"] for line in read_metrics(run)]
    assert len(losses) == 9 and losses[-1] < losses[0]
    for name in ("recipe.toml", "run.json", "metrics.jsonl", "report.html", "model/config.json"):
        assert (run / name).is_file(), name
    assert (run / "checkpoints/step-000009/manifest.json").is_file()
