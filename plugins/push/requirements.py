"""Checks before the run: repository, token and rights."""

import os

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__

from plugsft import RecipeError, reason_of

LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token with the right to write"


def ensure_name(name: str) -> None:
    """Refuse a name that no repository can have."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RecipeError(f'to: "{name}" is no name of a repository: {error}') from error


def ask_hub(name: str, private: bool) -> str:
    """Refuse an unusable repository or token; return why the hub gave no answer."""
    token = get_token()
    if not token:
        raise RecipeError(f"there is no token for the hub: {LOGIN}")
    api = HfApi(token=token, endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        user = str(api.whoami()["name"])
        name = name if "/" in name else f"{user}/{name}"
        is_private = bool(api.repo_info(name).private)
        api.auth_check(name, write=True)
    except RepositoryNotFoundError:
        return ""  # the first upload creates it
    except OfflineModeIsEnabled as error:
        raise RecipeError("HF_HUB_OFFLINE forbids the network; unset it") from error
    except Exception as error:  # of huggingface_hub and its HTTP client
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if status in (401, 403):
            raise RecipeError(
                f'to: the token may not write to "{name}" ({status}): {LOGIN}'
            ) from None
        reason = reason_of(error).replace(token, "***")
        return f"the hub gives no answer now: {type(error).__name__}: {reason[:200]}"
    if is_private != private:
        kind = "private" if is_private else "public"
        raise RecipeError(
            f'to: "{name}" exists and is {kind}; set private = {str(is_private).lower()}, or name '
            "another repository"
        )
    return ""
