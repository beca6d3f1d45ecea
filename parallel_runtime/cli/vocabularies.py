"""The flags in which sizes are given: ours, and those that other projects' own command lines take."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

from parallel_runtime.config import FrozenModel, ParallelConfig
from parallel_runtime.config.peers import MegatronSizes, SglangSizes, TorchtitanSizes, VllmSizes

__all__ = ["OURS", "PEERS", "Vocabulary", "flag_of", "helps_of", "option_help"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """One project's flags.

    Attributes:
        name: What ``--from`` calls it; ``""`` for ours.
        title: What people call it.
        helps: What each size means, by its name in Python.
        switches: The names that are on or off.
        further: Other flags that mean a size.
        required: Names that must be given.
        read: Makes a config of sizes by name.
    """

    name: str
    title: str
    helps: Mapping[str, str]
    switches: frozenset[str] = frozenset()
    further: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    required: tuple[str, ...] = ()
    read: Callable[..., ParallelConfig] = ParallelConfig

    def flags_of(self, name: str) -> tuple[str, ...]:
        """List the flags of a size, the usual one first.

        Args:
            name: One of ``helps``.

        Returns:
            Such as ``("--tp-size", "--tp", "--tensor-parallel-size")``.
        """
        return (
            flag_of(name),
            *(other for other, meant in self.further.items() if meant == name),
            *((f"--no-{flag_of(name).removeprefix('--')}",) if name in self.switches else ()),
        )

    def meaning(self, flag: str) -> str | None:
        """Say which size a flag means.

        Args:
            flag: Such as ``"--tp"``.

        Returns:
            Its name, or ``None`` for a flag of somebody else.
        """
        return next((name for name in self.helps if flag in self.flags_of(name)), None)

    def flag_for(self, axis: str) -> str | None:
        """Find the usual flag for one of our sizes.

        Args:
            axis: Such as ``"tp"``.

        Returns:
            Such as ``"--tp-size"``; ``None`` where the project has no word for it.
        """
        same = (name for name in self.helps if ParallelConfig.spellings.get(name, name) == axis)
        return next(map(flag_of, same), None)


def flag_of(name: str) -> str:
    """Write a name as a flag.

    Args:
        name: Such as ``"tp_size"``.

    Returns:
        Such as ``"--tp-size"``.
    """
    return f"--{name.replace('_', '-')}"


def helps_of(model: type[FrozenModel]) -> Mapping[str, str]:
    """Read what a model's docstring says about each field.

    Args:
        model: Its docstring has a section ``Attributes``.

    Returns:
        The first sentence about each field, with other fields written as flags.
    """
    section = (model.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^ {8}(?=\w)", section, flags=re.MULTILINE)
    said = dict(entry.split(": ", 1) for entry in entries if ": " in entry)

    def shown(name: str) -> str:
        sentence = re.split(r"(?<=\.)\s", " ".join(said[name].replace("`", "").split()))[0].rstrip(".")
        return re.sub(r"\w+", lambda word: flag_of(word[0]) if "_" in word[0] and word[0] in said else word[0], sentence)

    return MappingProxyType({name: shown(name) for name in model.model_fields})


def option_help(text: str) -> str:
    """Say of a flag what a docstring says of its setting, as argparse wants it.

    Args:
        text: From ``helps_of``.
    """
    return text.replace("; None ", "; left out, it ").replace("%", "%%")


def _peer(
    name: str, title: str, model: type[FrozenModel], read: Callable[..., ParallelConfig], further: Mapping[str, str]
) -> Vocabulary:
    fields = model.model_fields
    return Vocabulary(
        name=name,
        title=title,
        helps=helps_of(model),
        switches=frozenset(name for name, info in fields.items() if info.annotation is bool),
        further=MappingProxyType(dict(further)),
        required=tuple(name for name, info in fields.items() if info.is_required()),
        read=read,
    )


OURS = Vocabulary(
    name="",
    title="parallel-runtime",
    helps=MappingProxyType(
        {
            "tp": "tensor-parallel size of the dense part",
            "pp": "number of pipeline stages",
            "dp": "data-parallel size",
            "cp": "context-parallel size",
            "ep": "expert-parallel width; etp*ep divides tp*cp*dp",
            "etp": "tensor-parallel width inside an expert; left out, gcd(tp, tp*cp*dp/ep)",
            "dcp": "decode-context-parallel width: 1, or cp times a divisor of tp",
            "order": "dense axes, fastest first, such as tp-cp-dp-pp",
            "world_size": "number of ranks; fills in the one size given as -1",
        }
    ),
)
"""The words of this project."""

PEERS: Mapping[str, Vocabulary] = MappingProxyType(
    {
        "sglang": _peer(
            "sglang",
            "SGLang",
            SglangSizes,
            ParallelConfig.from_sglang,
            {
                "--tp": "tp_size",
                "--tensor-parallel-size": "tp_size",
                "--pp": "pp_size",
                "--pipeline-parallel-size": "pp_size",
                "--dp": "dp_size",
                "--data-parallel-size": "dp_size",
                "--ep": "ep_size",
                "--expert-parallel-size": "ep_size",
                "--attention-context-parallel-size": "attn_cp_size",
                "--moe-data-parallel-size": "moe_dp_size",
                "--decode-context-parallel-size": "dcp_size",
            },
        ),
        "vllm": _peer(
            "vllm",
            "vLLM",
            VllmSizes,
            ParallelConfig.from_vllm,
            {
                "-tp": "tensor_parallel_size",
                "-pp": "pipeline_parallel_size",
                "-dp": "data_parallel_size",
                "-pcp": "prefill_context_parallel_size",
                "-dcp": "decode_context_parallel_size",
                "-ep": "enable_expert_parallel",
            },
        ),
        "megatron": _peer("megatron", "Megatron-core", MegatronSizes, ParallelConfig.from_megatron, {}),
        "torchtitan": _peer("torchtitan", "torchtitan", TorchtitanSizes, ParallelConfig.from_torchtitan, {}),
    }
)
"""The words of other projects, by what ``--from`` calls them."""
