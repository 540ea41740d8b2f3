"""A test that hangs inside of C is ended and named, and the others run."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

HANG = """
import ctypes

def hang():
    # Nothing ends this wait, and it keeps Python's lock, as the destructor of a gloo group did.
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
TESTS = """
import subprocess
import pytest

pytestmark = pytest.mark.timeout(1)

@pytest.fixture
def before():
    hang()

@pytest.fixture
def after():
    yield
    hang()

def test_first():
    pass

def test_body():
    subprocess.Popen(["sleep", "150"])  # it must not keep the run from its end
    hang()

def test_setup(before):
    pass

def test_teardown_of_a_failure(after):
    assert False

def test_last():
    pass
"""


@pytest.fixture
def planted(tmp_path):
    """Give `planted(text, ...)`: the output, errors and exit code of pytest with such tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 10")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["watch"]')

    def run(text, *options):
        (tmp_path / "test_planted.py").write_text(HANG + text)
        code = "import sys, pytest; sys.path.append(sys.argv.pop(1)); sys.exit(pytest.main())"
        command = [sys.executable, "-c", code, str(Path(__file__).parent), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as process:
            try:
                return *process.communicate(timeout=120), process.returncode
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    return run


@pytest.mark.slow
def test_a_test_that_hangs_in_c_is_ended_and_named(request, planted):
    assert request.config.pluginmanager.has_plugin("watch")
    out, err, code = planted(TESTS, "-n", "1", "--dist", "worksteal")
    hung = {"test_body", "test_setup", "test_teardown_of_a_failure"}
    for name in hung:
        assert f"crashed while running 'test_planted.py::{name}'" in out, out + err
    assert code == 1 and "4 failed, 2 passed" in out, out + err
    assert err.count(" in hang\n") == len(hung), "it is shown where"


@pytest.mark.slow
def test_a_module_that_hangs_in_c_as_it_is_imported_is_ended_and_named(planted):
    _, err, code = planted("hang()")
    assert code == 1 and 'test_planted.py", line' in err, err
