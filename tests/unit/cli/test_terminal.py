"""What every command shows on a terminal: what each option takes on one line, and no color where NO_COLOR is set."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from dedup.cli.main import COMMANDS, create_app
from tests.terminal import OnTerminal

COLOR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3\d|4\d|9\d|10\d)(?:;[\d;]*)?m")
PATHS = [path for panel in COMMANDS.values() for path in panel]


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}".strip())


COMMAND_OF = dict(commands(get_command(create_app())))


def head_of(parameter: Any) -> re.Pattern[str]:
    """Return what matches the beginning of a row of help: an option and what it takes, or an argument's name."""
    words = [parameter.metavar] if parameter.param_type_name == "argument" else [parameter.opts[-1], parameter.metavar]
    return re.compile(rf" (\* +| *){' +'.join(re.escape(word) for word in words if word)}  +(?=\S)")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("path", COMMAND_OF)
def test_help_shows_each_option_with_what_it_takes_on_one_line(path, width):
    result = CliRunner().invoke(create_app(), [*path.split(), "--help"], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert re.search(r"<[a-z]| range|[<>]=", result.output) is None, "a type or a range in Python's terms"
    command = COMMAND_OF[path]
    heads = [head_of(each) for each in command.get_params(Context(command))]
    named = []
    for panel in re.findall(r"╭─ (?:Arguments|Options) .*?╰", result.output, re.DOTALL):
        text_at = 0
        for row in (line.strip("│") for line in panel.splitlines() if line.startswith("│")):
            found = [head for head in heads if head.match(row)]
            text_at = found[0].match(row).end() if found else text_at
            named += found
            assert found or not row[:text_at].strip(), f"this row continues more than a help text: {row}"
    assert len(named) == len(heads)
    assert set(named) == set(heads)


def test_a_number_beyond_its_limits_is_refused_as_help_says():
    result = CliRunner().invoke(create_app(), ["size", "--guard", "1d", "--duplicates", "2"])
    assert result.exit_code == 2
    assert "less than or equal to 1" in result.output


def on_a_terminal(*arguments: str, **environ: str) -> bytes:
    """Return what a command writes to a terminal, with its escape sequences."""
    with OnTerminal([sys.executable, "-m", "dedup.cli.main", *arguments], **environ) as command:
        return command.to_the_end()


@pytest.mark.parametrize(
    "arguments", [("--help",), ("run", "--nothing"), ("size", "--rate", "1000", "--guard", "1d")], ids=lambda a: a[0]
)
def test_no_color_is_respected(arguments):
    assert not COLOR.search(on_a_terminal(*arguments, NO_COLOR="1"))


def test_a_terminal_gets_colors_otherwise():
    assert COLOR.search(on_a_terminal("--help"))
