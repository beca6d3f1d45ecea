"""Where the settings of an engine come from, and which of them wins.

From the weakest to the strongest: the defaults, a file, variables that begin with ``PARALLEL_RUNTIME_ENGINE_``, and what the
caller gives (keywords, or flags on the command line). Each setting is taken from the strongest source that has it, so a file may
say the sizes and a variable the dtype. Sizes in another project's words replace all sizes that weaker sources give.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from parallel_runtime.config.base import FrozenModel
from parallel_runtime.config.deadlines import Deadlines
from parallel_runtime.config.parallel_config import ParallelConfig
from parallel_runtime.errors import ConfigError
from parallel_runtime.serving.engine_config import EngineConfig
from parallel_runtime.serving.sampling_params import SamplingParams
from parallel_runtime.serving.serving_config import ServingConfig
from parallel_runtime.serving.supervision import Supervision

__all__ = ["PREFIX", "Settings", "load_engine_config", "merge_settings", "read_settings_file", "read_variables", "variable_names"]

PREFIX = "PARALLEL_RUNTIME_ENGINE_"
"""How a variable begins that says a setting of an engine."""

Settings: TypeAlias = Mapping[str, Any]
"""Settings by name, as ``EngineConfig`` takes them; those of a part are a mapping of their own."""

_PARTS: Mapping[str, type[FrozenModel]] = MappingProxyType(
    {"parallel": ParallelConfig, "serving": ServingConfig, "supervision": Supervision, "deadlines": Deadlines}
)
_SIZES = frozenset(("tp", "pp", "dp", "cp", "ep", "etp", "dcp", "order", "world_size"))
_OUR_OTHERS = frozenset(ParallelConfig.model_fields) - _SIZES


def load_engine_config(
    *, file: str | Path | None = None, environ: Mapping[str, str] | None = None, given: Settings | None = None
) -> EngineConfig:
    """Make a config of all its sources.

    Args:
        file: A ``.json``, ``.yaml`` or ``.yml`` file.
        environ: Variables, usually ``current_environ()``; ``None`` reads none.
        given: What the caller says.

    Returns:
        The config.

    Raises:
        ConfigError: A source cannot be read, or a setting breaks a rule.
    """
    layers = [read_settings_file(file) if file is not None else {}, read_variables(environ or {}), given or {}]
    merged: Settings = {}
    for layer in layers:
        merged = merge_settings(merged, layer)
    return EngineConfig.model_validate(dict(merged))


def merge_settings(weaker: Settings, stronger: Settings) -> Settings:
    """Lay one source over another.

    Args:
        weaker: Settings that count where the other has none.
        stronger: Settings that win.

    Returns:
        All of them.
    """
    merged = dict(weaker)
    for name, value in stronger.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            if name == "parallel":
                below = _sizes_that_stay(below, value)
            merged[name] = merge_settings(below, value)
        else:
            merged[name] = value
    return merged


def read_settings_file(path: str | Path) -> Settings:
    """Read settings from a file.

    Args:
        path: A ``.json``, ``.yaml`` or ``.yml`` file that holds a mapping.

    Returns:
        The settings, not yet checked.

    Raises:
        ConfigError: It is of another kind, cannot be read, or holds no mapping.
    """
    path = Path(path)
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path}: settings are read from .json, .yaml or .yml files")
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else _parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings by name; write them as `model: smollm2`")
    return settings


def read_variables(environ: Mapping[str, str]) -> Settings:
    """Read settings from variables.

    Args:
        environ: Only those that begin with ``PREFIX`` are looked at.

    Returns:
        The settings, not yet checked. A text is read as JSON where it is JSON and the setting is no text.

    Raises:
        ConfigError: A variable begins so and names no setting.
    """
    known = variable_names()
    settings: Settings = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"an example is {PREFIX}SERVING_DTYPE"
            raise ConfigError(f"{variable} names no setting of an engine; {hint}")
        value: Any = environ[variable] if known[variable] in _TEXTS else _value(environ[variable])
        for name in reversed(known[variable]):
            value = {name: value}
        settings = merge_settings(settings, value)
    return settings


def variable_names() -> Mapping[str, tuple[str, ...]]:
    """List the variables that are read.

    Returns:
        Their names, and the way to each setting, such as ``("serving", "dtype")``.
    """
    return {PREFIX + "_".join(path).upper(): path for path in _paths(EngineConfig)}


_TEXTS = frozenset((("model",), ("executor",)))


def _paths(model: type[FrozenModel]) -> Iterator[tuple[str, ...]]:
    for name in model.model_fields:
        if name == "sampling":
            yield from ((name, setting) for setting in SamplingParams.__struct_fields__)
        elif name in _PARTS:
            yield from ((name, *rest) for rest in _paths(_PARTS[name]))
        else:
            yield (name,)
    if model is ParallelConfig:
        yield ("world_size",)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _sizes_that_stay(weaker: Settings, stronger: Settings) -> Settings:
    """Sizes in other words say everything about sizes."""
    if weaker.get("dialect") == stronger.get("dialect") or not set(stronger) - _OUR_OTHERS:
        return weaker
    return {name: value for name, value in weaker.items() if name in _OUR_OTHERS}


def _parse_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            "YAML files need PyYAML: pip install 'parallel-runtime[serve]'; or write the settings as JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"no YAML: {' '.join(str(error).split())}") from error
