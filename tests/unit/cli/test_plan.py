"""The command as users type it: what it prints, where, and how it ends."""

import argparse
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from parallel_runtime.cli.main import build_parser, main
from parallel_runtime.cli.vocabularies import PEERS
from parallel_runtime.config import ParallelConfig
from parallel_runtime.errors import LaunchError

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def fail(capsys: Capture, *arguments: str) -> str:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err


def test_plan_prints_what_the_library_says(capsys: Capture) -> None:
    assert (
        run(capsys, "plan", "--tp", "2", "--pp", "2", "--dp", "2", "--hosts", "2")
        == ParallelConfig(tp=2, pp=2, dp=2).plan(hosts=2).to_text()
    )


def test_plan_on_a_terminal_draws_tables(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel_runtime.cli.tables.Console", lambda: Console(force_terminal=True, width=120, no_color=True))
    out = run(capsys, "plan", "--tp", "2")
    assert "2 ranks on 1 host: tp=2" in out
    assert "│ host0 │ 2     │ 0 1" in out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_breaks_between_groups_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("parallel_runtime.cli.tables.Console", lambda: Console(force_terminal=True, width=width, no_color=True))
    out = run(capsys, "plan", "--tp", "2", "--pp", "2", "--dp", "2", "--hosts", "2")
    groups = out[out.index("Groups") : out.index("Hosts")]
    for pair in ("0 1", "2 3", "4 5", "6 7", "0 4", "1 5", "0 2", "1 3"):
        assert pair in groups
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines())) <= width


def test_a_suffix_is_not_needed(capsys: Capture, tmp_path: Path) -> None:
    run(capsys, "plan", "--svg", str(tmp_path / "picture"))
    assert (tmp_path / "picture").read_text(encoding="utf-8").startswith("<")


def help_texts() -> list[tuple[str, str, str]]:
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return [
        (command, ", ".join(action.option_strings) or str(action.metavar), action.help or "")
        for command, parser in commands.choices.items()
        for action in parser._actions
    ]


@pytest.mark.parametrize(("command", "option", "text"), help_texts())
def test_help_is_whole_and_about_the_command_line(command: str, option: str, text: str) -> None:
    assert text, (command, option)
    assert text.count("(") == text.count(")")
    assert text[-1].isalnum() or text[-1] in ")%"
    assert text.split()[-1] not in {"a", "an", "and", "are", "be", "by", "in", "is", "of", "or", "the", "to", "with"}
    assert not {"None", "True", "False"} & set(re.findall(r"\w+", text))
    assert not re.search(r"\b[a-z]+_\w+", text), "a name of Python's"


def test_help_of_another_projects_sizes_is_the_first_sentence_of_the_docs() -> None:
    assert PEERS["sglang"].helps["dp_size"] == (
        "Attention replicas when --enable-dp-attention is set; whole replicas otherwise, which are separate worlds here"
    )
    assert PEERS["vllm"].helps["enable_expert_parallel"].endswith("or each is cut over it (etp is)")


def test_one_rank(capsys: Capture) -> None:
    out = run(capsys, "plan", "--tp", "8", "--dp", "-1", "--world-size", "64", "--hosts", "8", "--rank", "9")
    assert out.startswith(
        "rank 9: tp=1 cp=0 dp=1 pp=0 ep=0 etp=1 edp=1 dcp=0; local rank 1 on host1; 4 communicators, 71 sockets"
    )
    assert "etp#1    8      no             -                same ranks as tp, whose communicators it shares" in out


def test_worlds_too_large_to_be_shown_whole(capsys: Capture) -> None:
    huge = ("--tp", "8", "--dp", "125000000")
    for options in (huge, (*huge, "--json", "--rank", "7"), ("tp=2", "diff", "tp=1000000000")):
        assert "1,000,000,000 ranks; worlds of up to 1,048,576 are shown whole" in fail(capsys, "plan", *options)
    assert run(capsys, "plan", *huge, "--rank", "999999999").startswith("rank 999999999: tp=7")


def test_json_and_pictures(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--svg", str(tmp_path / "a.svg"), "--png", str(tmp_path / "a.png"))
    plan = ParallelConfig(tp=2, pp=2).plan(hosts=["x", "x", "y", "y"])
    assert run(capsys, "plan", "--tp", "2", "--pp", "2", "--hosts", "x,x,y,y", "--json", *files) == f"{plan.to_json()}\n"
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == plan.to_svg()
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ("--from sglang --tp-size 8 --attn-dp-size 4 --ep-size 8", ParallelConfig(tp=2, dp=4, ep=8)),
        ("--from sglang --tp-size 8 --dp-size 4 --enable-dp-attention", ParallelConfig(tp=2, dp=4, etp=8)),
        ("--from sglang --tp 8 --dp 4 --pp 2 --ep 8 --enable-dp-attention", ParallelConfig(tp=2, dp=4, pp=2, ep=8)),
        (
            "--from sglang --tensor-parallel-size 8 --data-parallel-size 4 --expert-parallel-size 2 --enable-dp-attention",
            ParallelConfig(tp=2, dp=4, ep=2, etp=4),
        ),
        ("--from sglang --tp 8 --attention-context-parallel-size 2", ParallelConfig(tp=4, cp=2, etp=8)),
        ("--from sglang --tp 8 --decode-context-parallel-size 2", ParallelConfig(tp=8, dcp=2)),
        ("--from sglang --tp 8 --attn-cp-size 2 --moe-data-parallel-size 2", ParallelConfig(tp=4, cp=2, etp=4)),
        (
            "--from vllm --tensor-parallel-size 2 --pipeline-parallel-size 2",
            ParallelConfig.from_vllm(tensor_parallel_size=2, pipeline_parallel_size=2),
        ),
        (
            "--from vllm -tp 8 -pp 2 -dp 2 -pcp 2 -dcp 2",
            ParallelConfig(tp=8, pp=2, dp=2, cp=2, dcp=2, etp=32, order=("tp", "cp", "pp", "dp")),
        ),
        ("--from vllm -tp=2 -ep", ParallelConfig(tp=2, ep=2, etp=1, order=("tp", "cp", "pp", "dp"))),
        ("--from vllm -tp 2 --no-enable-expert-parallel", ParallelConfig(tp=2, order=("tp", "cp", "pp", "dp"))),
        ("--from megatron --world-size 8 --tensor-model-parallel-size 2 --order tp-cp-ep-dp-pp", ParallelConfig(tp=2, dp=4)),
        ("--from torchtitan --tensor-parallel-degree 2 --data-parallel-shard-degree 4", ParallelConfig(tp=2, dp=4, etp=1)),
        (
            "--tp 2 --pp 2 --dp 2 --order tp-cp-pp-dp --backend fake",
            ParallelConfig(tp=2, pp=2, dp=2, order=("tp", "cp", "pp", "dp"), backend="fake"),
        ),
    ],
)
def test_sizes_in_every_vocabulary(capsys: Capture, flags: str, config: ParallelConfig) -> None:
    assert run(capsys, "plan", *flags.split()) == config.plan().to_text()


def test_diff_of_texts_and_files(capsys: Capture, tmp_path: Path) -> None:
    before, after = ParallelConfig(tp=2, pp=2).plan(hosts=2), ParallelConfig(tp=4)
    (tmp_path / "before.json").write_text(before.to_json())
    (tmp_path / "after.json").write_text(after.model_dump_json())
    from_files = run(capsys, "plan", str(tmp_path / "before.json"), "diff", str(tmp_path / "after.json"))
    assert from_files == run(capsys, "plan", "tp=2,pp=2,hosts=2", "diff", "tp=4, backend=auto,order=tp-cp-dp-pp")
    assert from_files.startswith(f"{len(before.diff(after.plan()))} differences\n")
    assert run(capsys, "plan", "tp=2", "diff", "tp=2") == "The plans are equal.\n"
    assert run(capsys, "plan", "tp=2", "diff", "tp=2,device=cuda").startswith("3 differences")


def test_one_plan_as_text(capsys: Capture) -> None:
    assert run(capsys, "plan", "tp=2,pp=2", "--hosts", "2") == ParallelConfig(tp=2, pp=2).plan(hosts=2).to_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("nothing", "invalid choice: 'nothing'"),
        ("plan --bogus", "unrecognized arguments: --bogus"),
        ("plan --tp x", "argument --tp: invalid int value: 'x'"),
        ("plan --tp 0", "tp=0"),
        ("plan --tp 3 --world-size 8", "world_size=8 but"),
        ("plan --tp 2 --hosts 3", "2 ranks do not divide over hosts=3"),
        ("plan --tp 2 --rank 2", "--rank 2: the world has 2 ranks, 0 to 1"),
        ("plan --tp-size 2", "`--tp-size` is SGLang's: add `--from sglang`, or write `--tp`"),
        (
            "plan --tensor-parallel-size 2",
            "`--tensor-parallel-size` is SGLang's and vLLM's: add `--from sglang`, or add `--from vllm`, or write `--tp`",
        ),
        ("plan -dcp 2", "`-dcp` is vLLM's: add `--from vllm`, or write `--dcp`"),
        ("plan --moe-dp-size 2", "`--moe-dp-size` is SGLang's: add `--from sglang`"),
        (
            "plan --from vllm --tp 2",
            "`--tp` is parallel-runtime's and SGLang's, not vLLM's (--from vllm): write `--tensor-parallel-size`",
        ),
        (
            "plan --from torchtitan --etp 2",
            "`--etp` is parallel-runtime's, not torchtitan's (--from torchtitan): leave it out",
        ),
        ("plan --from megatron", "`--from megatron` needs `--world-size N`"),
        ("plan --tp 2 --tp 4", "`--tp 2` and `--tp 4` say the same size twice"),
        ("plan --from sglang --tp 2 --tp-size 4", "`--tp 2` and `--tp-size 4` say the same size twice"),
        ("plan --tp -1", "tp=-1 is filled in from the number of ranks: add `--world-size N`"),
        ("plan tp=-1", "tp=-1 is filled in from the number of ranks: a text must hold every size"),
        ("plan tp=2 --pp 2", "a PLAN says its own sizes; leave out `--pp`, or leave out 'tp=2'"),
        ("plan tp=2 --from vllm", "a PLAN says its own sizes; leave out `--from`"),
        ("plan --svg x.pdf", "--svg x.pdf: this option writes SVG; name the file x.svg"),
        ("plan --png x.svg", "--png x.svg: this option writes PNG; name the file x.png"),
        ("plan --tq 2", "unrecognized arguments: --tq; did you mean --tp? (see parallel-runtime plan --help)"),
        (
            "generate --max-tokens 3 x",
            "unrecognized arguments: --max-tokens; did you mean --max-new-tokens? (see parallel-runtime generate --help)",
        ),
        ("doctor now", "parallel-runtime doctor: unrecognized arguments: now (see parallel-runtime doctor --help)"),
        ("plan a b", "cannot read 'a b'; write PLAN, or PLAN diff PLAN"),
        ("plan nothing.json", "'nothing.json' is no file, and no settings"),
        ("plan tp=two", "tp='two'"),
        ("plan tp=2,pp=2,tp=4", "'tp=2,pp=2,tp=4' gives tp twice"),
        ("plan xp=2", "xp=2: ParallelConfig has no setting 'xp'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: Capture, arguments: str, message: str) -> None:
    assert message in fail(capsys, *arguments.split())


def test_a_file_that_is_not_json(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    assert "is not JSON" in fail(capsys, "plan", str(tmp_path / "a.json"))
    (tmp_path / "a.json").write_bytes(b"\xff")
    assert "is no text file" in fail(capsys, "plan", str(tmp_path / "a.json"))


def test_a_file_that_cannot_be_written_is_exit_code_1(capsys: Capture, tmp_path: Path) -> None:
    assert main(["plan", "--svg", str(tmp_path / "no" / "a.svg")]) == 1
    assert capsys.readouterr().err.endswith("a.svg: No such file or directory\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "parallel-runtime: interrupted\n"),
        (LaunchError("two\nlines"), 1, "parallel-runtime: two lines\n"),
        (OSError("disk"), 1, "parallel-runtime: disk\n"),
    ],
)
def test_failures_while_running(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def stop(text: str | None) -> None:
        raise error

    monkeypatch.setattr("parallel_runtime.cli.plan.parse_hosts", stop)
    assert main(["plan"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"]])
def test_help_and_version(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    out = capsys.readouterr().out
    assert "parallel-runtime" in out
    if arguments[0] == "plan":
        assert "sizes in SGLang's words (--from sglang)" in out
        assert "Width of a whole stage" in out


def test_json_is_json(capsys: Capture) -> None:
    assert json.loads(run(capsys, "plan", "--tp", "2", "--json"))["layout"]["tp"] == 2
