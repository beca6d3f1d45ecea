"""The base of everything a user writes: frozen, strict, and refusing in words."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from parallel_runtime.errors import ConfigError
from parallel_runtime.values import shown

__all__ = ["FrozenModel"]


class FrozenModel(BaseModel):
    """A frozen pydantic model with strict types and no extra fields.

    Nothing is converted (``True`` and ``"2"`` are not integers). Copies, deep copies and unpickled objects are validated again.

    Attributes:
        spellings: Other projects' names for the fields, offered when one of them is used here.

    Raises:
        ConfigError: A value breaks a rule (raised by the constructor and by everything else that makes an instance), or somebody
            tries to change an instance.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)

    spellings: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if final_base := next((base for base in cls.__mro__[1:] if "__final__" in vars(base)), None):
            raise ConfigError(
                f"{cls.__qualname__} cannot be a subclass: {final_base.__name__} is final, so that equal settings mean the same "
                f"everywhere; keep further settings in a model of your own beside it"
            )

    def __init__(self, *unnamed: object, **values: object) -> None:
        if unnamed:
            raise ConfigError(_ask_for_names(type(self), unnamed))
        try:
            super().__init__(**values)
        except ValidationError as exc:
            raise ConfigError(_explain(type(self), exc)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Make an instance from a mapping, or check one that exists.

        Args:
            obj: A mapping of field names to values, or an instance.
            **options: As pydantic's method takes them.

        Returns:
            The instance.

        Raises:
            ConfigError: A value breaks a rule.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as exc:
            raise ConfigError(_explain(cls, exc)) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Make an instance from JSON text.

        Args:
            json_data: What ``model_dump_json`` wrote, or text like it.
            **options: As pydantic's method takes them.

        Returns:
            The instance.

        Raises:
            ConfigError: The text is not JSON, or a value breaks a rule.
        """
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as exc:
            raise ConfigError(_explain(cls, exc)) from None

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        """Make an instance from a mapping of field names to text. A number given as text is refused: nothing is converted.

        Args:
            obj: Such as ``{"name": "x"}``.
            **options: As pydantic's method takes them.

        Returns:
            The instance.

        Raises:
            ConfigError: A text is not a value of its field, or a value breaks a rule.
        """
        try:
            return super().model_validate_strings(obj, **options)
        except ValidationError as exc:
            raise ConfigError(_explain(cls, exc)) from None

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:  # type: ignore[override]  # the plugin's own
        """Make an instance, validating it (pydantic's own method does not).

        Args:
            _fields_set: Taken for compatibility.
            **values: By field name.

        Returns:
            The instance.

        Raises:
            ConfigError: A value breaks a rule.
        """
        del _fields_set
        return cls(**values)

    def replace(self, **changes: object) -> Self:
        """Derive a variant; fields that were never set are derived again.

        Args:
            **changes: New values by field name.

        Returns:
            A new, validated instance.

        Raises:
            ConfigError: A value breaks a rule.
        """
        return type(self)(**{**self._given(), **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy, validating the copy (pydantic's own method does not).

        Args:
            update: New values by field name.
            deep: Taken for compatibility; all values are immutable.

        Returns:
            A new, validated instance.

        Raises:
            ConfigError: A value breaks a rule.
        """
        return self.replace(**(update or {}))

    def __copy__(self) -> Self:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.replace()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._given())

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ConfigError(_cannot_change(type(self), f"{name}={shown(value)}"))

    def __delattr__(self, name: str) -> NoReturn:
        raise ConfigError(_cannot_change(type(self), f"{name}=..."))

    def __setstate__(self, state: dict[Any, Any]) -> NoReturn:
        raise ConfigError(_cannot_change(type(self), "..."))

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Show what was set to something else than the default, so that the text makes an equal instance again."""
        fields = type(self).model_fields
        return ((name, value) for name, value in self._given().items() if value != fields[name].default)

    def __str__(self) -> str:
        return repr(self)

    def _given(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


def _rebuild(cls: type[FrozenModel], values: dict[str, object]) -> FrozenModel:
    return cls(**values)


def _cannot_change(cls: type[FrozenModel], change: str) -> str:
    return f"{_name_of(cls)} cannot be changed; make a variant with replace({change})"


def _explain(cls: type[FrozenModel], exc: ValidationError) -> str:
    return "; ".join(_explain_one(cls, error) for error in exc.errors(include_url=False))


def _explain_one(cls: type[FrozenModel], error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"]))
    came = f"{where}={shown(error['input'])}"
    kind = error["type"]
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        name = _name_of(cls)
        return f"{came}: {name} {'have' if name.endswith('s') else 'has'} no setting {where!r}; {_suggest(cls, where)}"
    if kind == "int_type":
        return f"{came} is {_kind_of(error['input'])}, not an integer, and nothing is converted; use an integer such as {where}=2"
    if kind == "missing":
        name = _name_of(cls)
        return f"{name} {'need' if name.endswith('s') else 'needs'} {where}=..."
    if kind == "json_invalid":
        return f"{_name_of(cls)}: {error['msg']}"
    message = error["msg"].removeprefix("Input ")
    return f"{came} {message}" if where else f"{_name_of(cls)}: {shown(error['input'])} {message}"


def _name_of(cls: type[FrozenModel]) -> str:
    """What a person calls it: its title, or else its class."""
    return cls.model_config.get("title") or cls.__name__


def _ask_for_names(cls: type[FrozenModel], unnamed: Sequence[object]) -> str:
    named = ", ".join(f"{name}={shown(value)}" for name, value in zip(cls.model_fields, unnamed, strict=False))
    return f"{_name_of(cls)} takes no values without names; give them by name: {cls.__name__}({named})"


def _kind_of(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _suggest(cls: type[FrozenModel], name: str) -> str:
    known = list(cls.model_fields)
    longer = [field for field in known if field.startswith(f"{name}_")]
    close = cls.spellings.get(name) or next(iter(difflib.get_close_matches(name, known, n=1) + longer), None)
    return f"did you mean {close!r}?" if close else f"it has {', '.join(known)}"
