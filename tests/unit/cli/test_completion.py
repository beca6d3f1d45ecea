"""What shells are told: every command and option, and a script that bash really completes with."""

import os
import pty
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

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


CASES = (
    ("parallel-runtime ", {"plan", "generate", "serve", "doctor", "bench", "trace", "completion"}),
    ("parallel-runtime bench --gro", {"--group"}),
    ("parallel-runtime bench --tp 2 --op all_g", {"all_gather"}),
    ("parallel-runtime plan --from v", {"vllm"}),
    ("parallel-runtime completion ", {"bash", "zsh", "fish"}),
)
"""What is typed, and what the shell offers."""

ZSH = r"""
unset FPATH; fpath=($HOME /usr/share/zsh/functions/**/*(/N) /usr/share/zsh/*/functions(/N))
autoload -Uz compinit; compinit -u -D
_capture() {
  compadd() {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then builtin compadd "$@"; return; fi
    typeset -a hits; builtin compadd -A hits "$@"; print -rl -- $hits >> $HOME/hits; builtin compadd "$@"
  }
  _main_complete
  print END >> $HOME/hits
}
zle -C capture complete-word _capture
bindkey '^X' capture
print END >> $HOME/hits
"""
"""Makes Ctrl-X complete what was typed, and write down what is offered."""


def test_fish_completes() -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    script = completion_script(build_parser(), "fish")
    for typed, offered in CASES:
        command = [fish, "--no-config", "-c", f"{script}\ncomplete -C '{typed}'"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ended.stderr == ""
        assert {line.split("\t")[0] for line in ended.stdout.splitlines()} == offered


@pytest.mark.timeout(90)
def test_zsh_completes(tmp_path: Path) -> None:
    """In a terminal, for zsh completes nowhere else."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_parallel-runtime").write_text(completion_script(build_parser(), "zsh"))
    (tmp_path / "setup").write_text(ZSH)
    hits = tmp_path / "hits"
    terminal, end = pty.openpty()
    environ = {**os.environ, "HOME": str(tmp_path), "TERM": "xterm"}
    with subprocess.Popen([zsh, "-f", "-i"], stdin=end, stdout=end, stderr=end, env=environ, start_new_session=True) as shell:
        os.close(end)
        shown = bytearray()
        threading.Thread(target=_read, args=(terminal, shown), daemon=True).start()
        try:
            assert _typed(terminal, f"source {tmp_path}/setup\n", hits, shown) == set()
            for typed, offered in CASES:
                assert _typed(terminal, f"\x15{typed}\x18", hits, shown) == offered
        finally:
            shell.kill()
    os.close(terminal)


def _read(terminal: int, shown: bytearray) -> None:
    with suppress(OSError):  # the shell has gone
        while True:
            shown += os.read(terminal, 1 << 16)


def _typed(terminal: int, keys: str, hits: Path, shown: bytearray) -> set[str]:
    hits.write_text("")
    os.write(terminal, keys.encode())
    until = time.monotonic() + 60
    while "END" not in (told := hits.read_text().split("\n")):
        assert time.monotonic() < until, bytes(shown[-2000:])
        time.sleep(0.02)
    return set(told) - {"END", ""}
