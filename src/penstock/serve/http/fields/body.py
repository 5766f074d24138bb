"""What all bodies of requests are: fields that are known, and fields whose feature is not built.

Owns how the latter are marked and refused, and the names of sampling that several routes share.
"""
from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeAlias, get_type_hints

from penstock.config.base.errors import RequestError
from penstock.serve.ignored import OfBody


class Neutral:
    """Marks a field whose feature is not built: null is taken, and these values, which ask for nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = [None, *values]


Unbuilt: TypeAlias = Annotated[Any, Neutral()]


class Body(OfBody, kw_only=True, forbid_unknown_fields=True):
    """A request's body."""

    def checked(self) -> None:
        """Raises RequestError for a field that is not supported at its value."""
        for name, allowed in unbuilt(type(self)).items():
            value = getattr(self, name)
            if not any(type(value) is type(ok) and value == ok for ok in allowed):      # 0 is not False here
                raise RequestError(f"{name} is not supported at this value: it is not built", name)


@cache
def unbuilt(kind: type[Body]) -> dict[str, list[Any]]:
    """Fields of features that are not built, each with the values that are taken."""
    return {name: mark.values for name, hint in get_type_hints(kind, include_extras=True).items()
            for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Neutral)}


class Sampled(Body, kw_only=True, forbid_unknown_fields=True):
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
