"""Every command of docs/tutorial-docker.md is pasted into an empty directory, and prints what the page shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]
PAGE = Path(__file__).parents[2] / "docs" / "tutorial-docker.md"
ASKED = "docker exec worker-1 dedup lookup orders.yaml A-2 --config worker.yaml || true"

Paste = Callable[[str], str]


def blocks() -> list[tuple[str, str | None]]:
    """Return each block of commands, and the output that the page shows after it."""
    found = re.findall(r"^```(sh|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    pairs: list[tuple[str, str | None]] = []
    for kind, text in found:
        if kind == "text":
            assert pairs[-1][1] is None
            pairs[-1] = (pairs[-1][0], text)
        else:
            pairs.append((text, None))
    return pairs


@pytest.fixture
def shell(tmp_path: Path, image: str) -> Iterator[Paste]:
    """Return what pastes commands into one Bash in an empty directory; the page's containers are gone at the end.

    Containers, volumes, and the network get names of this test's own, because the engine is not this test's own.
    """
    if shutil.which("docker") is None:
        pytest.skip("Docker's command line is not here; install it (apt-get install docker.io)")
    tmp_path.chmod(0o755)  # the page says that user 10001 must be able to read the directory
    mine = f"t{uuid.uuid4().hex[:8]}-"

    def here(text: str) -> str:
        text = text.replace("dedup:local", image)
        text = re.sub(r"(?<=--network )dedup|(?<=network create )dedup|(?<=network rm )dedup", f"{mine}net", text)
        text = re.sub(r"\b(?=(?:worker|state)-[$12])", mine, text)
        return re.sub(
            r"(?<=--name )kafka|(?<=worker-2 )kafka$|kafka(?=:9092)", f"{mine}kafka", text, flags=re.MULTILINE
        )

    with subprocess.Popen(
        ["bash"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT
    ) as bash:
        assert bash.stdin is not None
        assert bash.stdout is not None

        def paste(commands: str) -> str:
            bash.stdin.write(f"set -e\n{here(commands)}\necho =DONE\n")
            bash.stdin.flush()
            said = ""
            for line in bash.stdout:
                if line == "=DONE\n":
                    return said.replace(mine, "")
                said += line
            raise AssertionError((commands, said))

        yield paste
        bash.stdin.close()
    subprocess.run(["bash", "-c", here(blocks()[-1][0])], check=False, capture_output=True)


def test_from_an_empty_directory_to_two_workers_with_docker_only(shell: Paste) -> None:
    said = {}
    for commands, shown in blocks():
        if "dedup status" in commands:
            # A person looks when both workers say that they run.
            until(lambda: shell("docker logs worker-1; docker logs worker-2").count("running from offset") >= 4, "run")
            until(lambda: shell(ASKED).startswith("seen"), "A-2 is known")
        said[commands] = shell(commands)
        if shown is not None:
            wanted = re.escape(shown).replace("…", r"\w+") + r"\Z"
            assert re.search(wanted, said[commands]), (commands, said[commands])
    (status,) = [said[commands] for commands in said if "dedup status" in commands]
    assert status.count("orders/") >= 4
