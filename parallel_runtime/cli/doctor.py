"""``parallel-runtime doctor``: look at a machine before a job, or at the ranks of one that runs."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from parallel_runtime.cli.tables import STYLES
from parallel_runtime.config.addresses import parse_address
from parallel_runtime.config.environment import current_environ
from parallel_runtime.context.attach import LiveContext, attach
from parallel_runtime.context.doctor import Finding, examine_machine
from parallel_runtime.errors import RendezvousError

__all__ = ["add_doctor"]

_EXAMPLES = """\
examples:
  parallel-runtime doctor
  parallel-runtime doctor --attach 127.0.0.1:29500
  parallel-runtime doctor --attach 127.0.0.1:29500 --context 3f2a --json
"""


def add_doctor(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand ``doctor``.

    Args:
        commands: Where to add it.
    """
    parser = commands.add_parser(
        "doctor",
        help="look at this machine before a job, or at the ranks of a job that hangs",
        description="Without --attach: names, interfaces, ports, memory, clocks, limits, GPUs and variables of this machine. "
        "With it: who the ranks of a running job are, what they have opened, and which operation each is in.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--attach", metavar="HOST:PORT", help="the store of the job: MASTER_ADDR:MASTER_PORT of its ranks")
    parser.add_argument("--context", metavar="UID", default="", help="only the context whose uid starts so")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.attach is None:
        findings = examine_machine(current_environ())
        _write(options.json, [asdict(finding) for finding in findings], [_line(finding) for finding in findings])
        return 1 if any(finding.verdict == "bad" for finding in findings) else 0
    address = parse_address(options.attach)
    contexts = attach(address.host, address.port, uid=options.context)
    if not contexts:
        raise RendezvousError(f"no context {options.context or ''} meets in the store at {address}".replace("  ", " "))
    _write(options.json, [_facts(context) for context in contexts], [line for context in contexts for line in context.lines()])
    return 0


def _line(finding: Finding) -> str:
    return f"{finding.verdict:4}  {finding.topic:18}  {finding.text}"


def _facts(context: LiveContext) -> dict[str, Any]:
    return {**asdict(context), "reports": msgspec.to_builtins(context.reports, str_keys=True), "difference": context.difference}


def _write(as_json: bool, facts: object, lines: list[str]) -> None:
    console = Console(soft_wrap=True)
    if console.is_terminal and not as_json:
        for line in lines:
            console.print(Text(line, style=STYLES.get(line.partition(" ")[0], "")))
        return
    text = json.dumps(facts, indent=2, default=dict) if as_json else "\n".join(lines)
    sys.stdout.write(f"{text}\n")
