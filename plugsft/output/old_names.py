"""Names that plugsft 0.1 wrote into run.json and metrics.jsonl, read as those of today."""

from typing import Any

METRICS = {
    "wait_seconds": "data_wait_seconds",
    "fill": "padding",
    "documents": "examples_per_micro_batch",
}
BATCHES = {**METRICS, "waited": "data_wait_share"}


def rename_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics under the names of today.

    A line of today has `data_wait_seconds`, and a plugin may call its own metric `fill`.
    """
    is_old = "wait_seconds" in line and "data_wait_seconds" not in line
    return _rename(line, METRICS) if is_old else line


def rename_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return run.json's content under the names of today."""
    record = {("batches" if name == "feeding" else name): it for name, it in record.items()}
    if isinstance(batches := record.get("batches"), dict):
        record["batches"] = _rename(batches, BATCHES)
    if record.get("status") == "finished":
        record["status"] = "completed"
    plugins = record.get("plugins")
    for entry in plugins if isinstance(plugins, list) else ():
        if isinstance(entry, dict) and "verdict" in entry:
            entry["summary"] = entry.pop("verdict")
    return record


def _rename(table: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): _value(name, value) for name, value in table.items()}


def _value(name: str, value: Any) -> Any:
    """Return the share of padding for the share of tokens; other values unchanged."""
    return round(1 - value, 4) if name == "fill" and isinstance(value, int | float) else value
