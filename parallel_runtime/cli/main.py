"""The command ``parallel-runtime``: its frame, and how it ends.

Exit codes: 0 done; 1 something failed while running; 2 the input is wrong; 130 interrupted. Whatever fails is said in one line on
standard error.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, TypeAlias, final

from parallel_runtime.cli.bench import add_bench
from parallel_runtime.cli.completion import add_completion
from parallel_runtime.cli.doctor import add_doctor
from parallel_runtime.cli.generate import add_generate
from parallel_runtime.cli.plan import add_plan
from parallel_runtime.cli.serve import add_serve
from parallel_runtime.cli.trace import add_trace
from parallel_runtime.errors import ArgumentError, CheckpointError, ConfigError, ParallelRuntimeError, RequestError

__all__ = ["AddCommand", "build_parser", "main"]

AddCommand: TypeAlias = Callable[["argparse._SubParsersAction[Any]"], None]
"""Adds one subcommand. Its parser must set ``run``, a function from the parsed arguments to an exit code."""

_COMMANDS: tuple[AddCommand, ...] = (add_plan, add_generate, add_serve, add_doctor, add_bench, add_trace)


@final
class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]  # the overloads differ in the namespace only, of which there is one here
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what is unknown where it was met, so that the message names the right command and its nearest option."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    parser = _Parser(
        prog="parallel-runtime",
        description="Plan, and run, large PyTorch models over many ranks.",
        epilog="exit codes: 0 done, 1 failed while running, 2 wrong input, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parallel-runtime {version('parallel-runtime')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(commands)
    add_completion(commands, build_parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the program's name; by default the process's own.

    Returns:
        The exit code.
    """
    parsed = build_parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        code = run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (ArgumentError, ConfigError, CheckpointError, RequestError) as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except ParallelRuntimeError as error:
        return _fail(str(error), 1)
    return code


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"parallel-runtime: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
