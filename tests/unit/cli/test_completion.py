"""What shells are told: every command and option, and a script that bash really completes with."""

import shutil
import subprocess

import pytest

from parallel_runtime.cli.completion import completion_script
from parallel_runtime.cli.main import build_parser, main


def _complete(*words: str) -> list[str]:
    bash = shutil.which("bash")
    assert bash is not None
    line = " ".join(f"'{word}'" for word in ("parallel-runtime", *words))
    script = f"{completion_script(build_parser(), 'bash')}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words)}\n_parallel_runtime\n"
    ended = subprocess.run([bash, "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_bash_completes_commands_options_and_choices() -> None:
    assert _complete("p") == ["plan"]
    assert {"bench", "trace", "doctor", "completion"} <= set(_complete(""))
    assert _complete("bench", "--war") == ["--warmup"]
    assert _complete("bench", "--tp", "2", "--op", "all_g") == ["all_gather"]
    assert _complete("plan", "--from", "v") == ["vllm"]
    assert _complete("completion", "z") == ["zsh"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_option_of_every_command_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (
        "plan",
        "generate",
        "serve",
        "doctor",
        "bench",
        "trace",
        "world-size",
        "max-new-tokens",
        "microbatches",
        "attach",
    ):
        assert word in script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_can_read_its_script(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = completion_script(build_parser(), shell)
    ended = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
