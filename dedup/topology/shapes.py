"""What the shapes of topology and ingest files share: strict mappings, names, topics, the version."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from dedup.core.event_time import TimeUnit
from dedup.core.paths import parse_path
from dedup.quantities import DURATION_PATTERN, parse_duration

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
VERSION: Final = 1


class Keys(BaseModel):
    """A mapping that refuses keys it does not know and values that are nearly right."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def name_text(text: str) -> str:
    """Return the name of a topology or source; raises ValueError with a sentence for what is none."""
    if NAME.fullmatch(text) is None:
        raise ValueError(f'"{text}" is no name; use a-z, 0-9 and "-", at most 100 characters, a letter or digit first')
    return text


def topic_text(text: str) -> str:
    """Return the name of a topic; raises ValueError with a sentence for what is none."""
    if TOPIC.fullmatch(text) is None or text in {".", ".."}:
        raise ValueError(f'"{text}" is no topic name; Kafka takes 1 to 249 of a-z A-Z 0-9 "." "_" "-"')
    return text


def version_text(number: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
    """Return a version of the format that this program reads; raises ValueError with a sentence for another."""
    if number != VERSION or isinstance(number, bool):
        raise ValueError(f'"{number}" is not a version this program reads; write {VERSION}')
    return number


def no_number(value: Any) -> Any:  # noqa: ANN401 - whatever stands in the file
    """Let a bare number through as its text, so that it is refused for its missing unit."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def text_like(pattern: str) -> WithJsonSchema:
    """Return what the JSON Schema says of a text of this form."""
    return WithJsonSchema({"type": "string", "pattern": pattern})


def _duration(text: str) -> str:
    parse_duration(text)
    return text


def _positive_duration(text: str) -> str:
    if parse_duration(text) == 0:
        raise ValueError(f'"{text}" must be longer than nothing')
    return text


def field_paths(paths: list[str]) -> list[str]:
    """Return the paths of a composite ID; raises ValueError with a sentence where there is none, or one twice."""
    if not paths:
        raise ValueError("is an empty list; name at least one path")
    parsed = [parse_path(path) for path in paths]
    for at, path in enumerate(parsed):
        if path in parsed[:at]:
            raise ValueError(f'"{paths[at]}" is listed twice')
    return paths


def _path(text: str) -> str:
    parse_path(text)
    return text


FieldPath = Annotated[str, AfterValidator(_path)]
Duration = Annotated[str, BeforeValidator(no_number), AfterValidator(_duration), text_like(DURATION_PATTERN)]
PositiveDuration = Annotated[
    str, BeforeValidator(no_number), AfterValidator(_positive_duration), text_like(DURATION_PATTERN)
]


class FieldTimeFile(Keys):
    """The event time is a member of the JSON value."""

    field: FieldPath = Field(description="Where it stands.")
    unit: TimeUnit = Field(description="rfc3339 text, or a number of seconds, milliseconds or microseconds.")
