"""The pages about plans, launchers and the command show real output."""

import re
from pathlib import Path

import pytest

from parallel_runtime.cli.main import main
from parallel_runtime.config import ParallelConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("how_to/read_a_plan.md", "how_to/launchers.md", "reference/environment.md", "reference/cli.md")
COMMANDS = [
    (page, *found)
    for page in PAGES
    for found in re.findall(
        r"```console\n\$ parallel-runtime ([^\n]*)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL
    )
]


def test_commands_were_found() -> None:
    assert len(COMMANDS) == 7


@pytest.mark.parametrize(("page", "command", "shown"), COMMANDS)
def test_a_shown_command_prints_what_is_shown(page: str, command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(command.split())
    captured = capsys.readouterr()
    assert captured.out + captured.err == shown


@pytest.mark.parametrize(
    ("name", "config", "hosts"),
    [
        ("plan_8_ranks", ParallelConfig(tp=2, pp=2, dp=2), 2),
        ("plan_1024_ranks", ParallelConfig(tp=8, pp=8, dp=16, ep=8), 128),
    ],
)
def test_pictures_are_what_the_library_draws(name: str, config: ParallelConfig, hosts: int) -> None:
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == config.plan(hosts=hosts).to_svg()
