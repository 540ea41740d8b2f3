"""Errors of the hub and its network: those that pass, and cures for others."""

from collections.abc import Iterator

from huggingface_hub.errors import OfflineModeIsEnabled

from ..hub_names import HUB

MOMENTARY = (408, 409, 412, 425, 429)
"""Answers that may differ in a moment: too slow, another commit came first, too many requests."""
LOGIN = "`hf auth login`, or set HF_TOKEN to a token with the right to write"
AGAIN = f"log in again with {LOGIN}"


def momentary(error: BaseException) -> str | None:
    """Return why a request failed, if another may succeed soon; else None."""
    for cause in _causes(error):
        if (status := _status(cause)) is not None:
            passing = status in MOMENTARY or status >= 500
            return f"the hub answers {status}: {_first_line(cause)}" if passing else None
        if isinstance(cause, OfflineModeIsEnabled):
            return None
        network = type(cause).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore")
        if network or isinstance(cause, ConnectionError | TimeoutError):
            return f"no answer of the hub: {type(cause).__name__}: {_first_line(cause)}"
    # hf_xet, which has tried again by itself, raises its failures so.
    return f"the upload failed: {_first_line(error)}" if type(error) is RuntimeError else None


def explain(error: BaseException, name: str) -> str:
    """Return the message for a request that would fail again."""
    statuses = [status for cause in _causes(error) if (status := _status(cause)) is not None]
    why = _first_line(error)
    match statuses:
        case [401, *_]:
            return f"{HUB}{name}: the hub refuses the token (401); {AGAIN}"
        case [403, *_]:
            return f"{HUB}{name}: this token may not write there (403: {why}); {AGAIN}"
        case [404, *_]:
            return f"{HUB}{name}: the hub has none, or hides it from this token (404); {AGAIN}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{HUB}{name}: HF_HUB_OFFLINE forbids the network; unset it"
    return f"{HUB}{name}: {type(error).__name__}: {why}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the status code of the answer that an error is about."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().partition("\n")[0] or "no reason given")[:300]
