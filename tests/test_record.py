"""What plugsft computes and says is what the record says; `python tests/record.py` shows more.

Tokens and messages are compared exactly. Numbers are not: processors with other vector units add
in another order, which moves the last bits of a loss. So numbers of six digits may be off by 1e-4.
A checksum of weights would differ between processors, so each tensor leaves two numbers.
"""

import json

import pytest
from record import FILE, Recorder, differences


@pytest.mark.slow
def test_runs_tokens_and_messages_are_those_of_the_record(tmp_path):
    expected = json.loads(FILE.read_text(encoding="utf8"))
    found = list(differences(expected, Recorder(tmp_path).all()))
    assert not found, "\n".join(["python tests/record.py --write, if this is meant:", *found])


def test_the_record_sees_small_changes():
    old = {"steps": ["1: loss 5.12345, tokens 448"], "text": "two rows"}
    assert not [*differences(old, {"steps": ["1: loss 5.12346, tokens 448"], "text": "two rows"})]
    assert [*differences(old, {"steps": ["1: loss 5.12545, tokens 448"], "text": "two rows"})]
    assert [*differences(old, {"steps": ["1: loss 5.12345, tokens 449"], "text": "two rows"})]
    assert [*differences(old, {"steps": ["1: loss 5.12345, tokens 448"], "text": "two row"})]
