"""What several test files use."""

import signal

import pytest


@pytest.fixture
def interrupts():
    """SIGINT as at a prompt; a job in the background of a script inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
