"""Turns of chats, and the folder of TRL's templates to write them with."""

from pathlib import Path

import trl

FOLDER = Path(trl.__file__).parent / "chat_templates"
ASK, TELL = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "owls"}
SYSTEM = {"role": "system", "content": "be brief"}
FUNCTION = {"name": "look_up", "arguments": {"word": "owl"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "abcdef123", "content": "a bird"}
