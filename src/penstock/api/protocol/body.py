"""What all bodies of requests are: fields that are known, and fields whose feature is not built.

Owns how the latter are marked and refused, and the names of sampling that several routes share.
"""
from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeAlias, get_type_hints

from penstock.config.base.errors import RequestError
from penstock.config.request.ignored import OfBody


class Neutral:
    """Marks a field whose feature is not built: null is taken, and these values, which ask for nothing."""

    def __init__(self, *values: Any, instead: str = "") -> None:
        """instead: the field that does the same here."""
        self.values, self.instead = [None, *values], instead


Unbuilt: TypeAlias = Annotated[Any, Neutral()]


# Entries of fields at most, wherever they are: looked at before anything is made of them. As OpenAI's API has
# them, where it has a bound.
ENTRIES_MAX = {"logit_bias": 300, "metadata": 16, "stop": 16, "stop_sequences": 16, "stop_token_ids": 64,
               "include": 64}
METADATA_CHARS_MAX = (64, 512)          # of a key, of a value


class Body(OfBody, kw_only=True, forbid_unknown_fields=True):
    """A request's body."""

    def checked(self) -> None:
        """Raises RequestError for a field that is too long, or not supported at its value."""
        self.bounded()
        for name, mark in unbuilt(type(self)).items():
            value = getattr(self, name)
            if any(type(value) is type(ok) and value == ok for ok in mark.values):      # 0 is not False here
                continue
            if mark.instead:
                raise RequestError(f"{name} is not supported: use {mark.instead}", name)
            raise RequestError(f"{name} is not supported at this value: it is not built", name)

    def bounded(self) -> None:
        """Raises RequestError for a field with too many entries, of a part that is a Body too."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Body):
                value.bounded()
            elif (most := ENTRIES_MAX.get(name)) and isinstance(value, (list, dict)) and len(value) > most:
                raise RequestError(f"{name} has {len(value)} entries: at most {most}", name)
        longest = METADATA_CHARS_MAX
        given: dict[str, Any] | None = getattr(self, "metadata", None)
        if given and any(len(k) > longest[0] or len(str(v)) > longest[1] for k, v in given.items()):
            raise RequestError(f"metadata has keys of at most {longest[0]} characters and values of at "
                               f"most {longest[1]}", "metadata")


@cache
def unbuilt(kind: type[Body]) -> dict[str, Neutral]:
    """Fields of features that are not built, each with the values that are taken."""
    return {name: mark for name, hint in get_type_hints(kind, include_extras=True).items()
            for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Neutral)}


class SamplingBody(Body, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen, in words that OpenAI, vLLM and SGLang share. None is "not given"."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None            # SGLang's name of include_stop_str_in_output
    skip_special_tokens: bool | None = None
    json_schema: dict[str, Any] | str | None = None     # these three: SGLang's, of what the answer must match
    regex: str | None = None
    ebnf: str | None = None
