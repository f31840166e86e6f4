"""What all sections share: nothing unknown, nothing coerced, nothing changed afterwards."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

NONE_WORDS = ("none", "None", "null")


class Section(BaseModel):
    """A table of the TOML. Types are strict (2.5 and "10" are no ints), but an int serves where a float is wanted."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _none_by_word(cls, values: Any) -> Any:
        """TOML has no null: the word "none" stands for it where a field may be absent."""
        if not isinstance(values, dict) or not any(isinstance(v, str) and v in NONE_WORDS for v in values.values()):
            return values
        fields = fields_by_key(cls)
        return {
            key: None if isinstance(v, str) and v in NONE_WORDS and key in fields and may_be_none(fields[key]) else v
            for key, v in values.items()
        }


def fields_by_key(section: type[BaseModel]) -> dict[str, Any]:
    """The fields of a section by the key that a TOML writes (`import`, where Python must say `imports`)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def may_be_none(field: Any) -> bool:
    return type(None) in get_args(field.annotation)


def _listed(value: Any) -> Any:
    """A single string where a list of strings is wanted is taken as a list of one."""
    return [value] if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """A number where a word or a number may stand (`selective_ac_option = 2`) becomes text."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Degree = Annotated[int, Field(ge=1)]
Names = Annotated[list[str], BeforeValidator(_listed)]
Word = Annotated[str, BeforeValidator(_text), WithJsonSchema({"type": ["string", "integer"]})]
