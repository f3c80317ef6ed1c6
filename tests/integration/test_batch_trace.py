"""The path of one batch through the code stays short. It once grew from 148 to 196 switches between files, unnoticed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_SWITCHES = 22, 170
"""A batch passed 20 files with 148 switches. The rest is room for a check of the topics, or a retry, during the batch."""


@pytest.mark.broker
def test_a_batch_passes_few_files():
    done = subprocess.run(
        [sys.executable, "-m", "bench.batch_trace"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.match(r"one batch: (\d+) files, (\d+) switches;", done.stdout)
    assert found is not None, done.stdout
    files, switches = map(int, found.groups())
    assert (files <= MOST_FILES, switches <= MOST_SWITCHES) == (True, True), done.stdout
