"""``parallel-runtime completion``: what a shell needs to complete the command line, made from its parsers."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

__all__ = ["add_completion", "completion_script"]

_PROGRAM: Final = "parallel-runtime"
_EXAMPLES = """\
  bash   parallel-runtime completion bash > ~/.local/share/bash-completion/completions/parallel-runtime
  zsh    parallel-runtime completion zsh > ~/.zfunc/_parallel-runtime      (with fpath+=~/.zfunc before compinit)
  fish   parallel-runtime completion fish > ~/.config/fish/completions/parallel-runtime.fish
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]


def add_completion(commands: "argparse._SubParsersAction[Any]", build: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the subcommand ``completion``.

    Args:
        commands: Where to add it.
        build: Makes the parser of the whole command line.
    """
    parser = commands.add_parser(
        "completion",
        help="print a script that lets a shell complete this command",
        description="Print a script that lets a shell complete commands, options and their choices.",
        epilog=f"where it goes:\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=tuple(_WRITERS), help="which shell")
    parser.set_defaults(run=lambda options: _run(options, build()))


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write a completion script.

    Args:
        parser: Of the whole command line.
        shell: ``"bash"``, ``"zsh"`` or ``"fish"``.

    Returns:
        The script.
    """
    return _WRITERS[shell](tuple(_commands(parser)))


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    sys.stdout.write(completion_script(parser, options.shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> Iterator[_Command]:
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    for name, command in subparsers.choices.items():
        options = tuple(_option(action) for action in command._actions if action.option_strings)
        words = tuple(str(word) for action in command._actions if not action.option_strings for word in action.choices or ())
        yield _Command(name=name, help=helps.get(name, ""), options=options, words=words)


def _option(action: argparse.Action) -> _Option:
    text = " ".join((action.help or "").replace("%%", "%").split())
    choices = tuple(map(str, action.choices or ()))
    return _Option(flags=tuple(action.option_strings), help=text, takes_value=action.nargs != 0, choices=choices)


def _bash(commands: tuple[_Command, ...]) -> str:
    cases, values = [], []
    for command in commands:
        flags = " ".join(flag for option in command.options for flag in option.flags)
        cases.append(f'        {command.name}) words="{" ".join((*command.words, flags))}" ;;')
        for option in command.options:
            if option.takes_value:
                found = f'words="{" ".join(option.choices)}"' if option.choices else "files=1"
                values += [f"        {command.name}:{flag}) {found} ;;" for flag in option.flags]
    names = " ".join(command.name for command in commands)
    return "\n".join(
        [
            "_parallel_runtime() {",
            '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"',
            '    local words="" files=""',
            "    COMPREPLY=()",
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))',
            "        return",
            "    fi",
            '    case "$command:$before" in',
            *values,
            "    esac",
            '    if [ -z "$words$files" ]; then',
            '        case "$command" in',
            *("    " + case for case in cases),
            "        esac",
            "    fi",
            '    [ -n "$words" ] && COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '    [ ${#COMPREPLY[@]} -eq 0 ] && COMPREPLY=($(compgen -f -- "$current"))',
            "    return 0",
            "}",
            f"complete -o filenames -F _parallel_runtime {_PROGRAM}",
            "",
        ]
    )


def _zsh(commands: tuple[_Command, ...]) -> str:
    def quoted(text: str) -> str:
        return text.replace("'", "'\\''").replace("[", "(").replace("]", ")").replace(":", " -")

    lines = [f"#compdef {_PROGRAM}", "", "_parallel_runtime() {", "    local -a commands", "    commands=("]
    lines += [f"        '{command.name}:{quoted(command.help)}'" for command in commands]
    lines += ["    )", "    if (( CURRENT == 2 )); then", "        _describe command commands", "        return", "    fi"]
    lines += ['    local command="$words[2]"', "    shift words", "    (( CURRENT-- ))", '    case "$command" in']
    for command in commands:
        lines += [f"        {command.name})", "            _arguments \\"]
        for option in command.options:
            value = (
                "" if not option.takes_value else f":value:({' '.join(option.choices)})" if option.choices else ":value:_files"
            )
            lines += [f"                '{flag}[{quoted(option.help)}]{value}' \\" for flag in option.flags]
        words = f"({' '.join(command.words)})" if command.words else "_files"
        lines += [f"                '*:argument:{words}' ;;"]
    return "\n".join([*lines, "    esac", "}", "", '_parallel_runtime "$@"', ""])


def _fish(commands: tuple[_Command, ...]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = []
    for command in commands:
        lines.append(f"complete -c {_PROGRAM} -f -n __fish_use_subcommand -a {command.name} -d {quoted(command.help)}")
        seen = f"complete -c {_PROGRAM} -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{seen} -f -a {quoted(' '.join(command.words))}")
        for option in command.options:
            flags = " ".join(_fish_flag(flag) for flag in option.flags)
            value = f" -x -a {quoted(' '.join(option.choices))}" if option.choices else " -r" if option.takes_value else ""
            lines.append(f"{seen} {flags}{value} -d {quoted(option.help)}")
    return "\n".join([*lines, ""])


def _fish_flag(flag: str) -> str:
    if flag.startswith("--"):
        return f"-l {flag.removeprefix('--')}"
    return f"-s {flag[1:]}" if len(flag) == 2 else f"-o {flag[1:]}"


_WRITERS: Mapping[str, Callable[[tuple[_Command, ...]], str]] = MappingProxyType({"bash": _bash, "zsh": _zsh, "fish": _fish})
