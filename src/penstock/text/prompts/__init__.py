"""What prompts need beside a model's own template: Jinja files of ours for models that publish a program in
place of one, a file for each model type; and the forms that arguments of calls may take."""
from __future__ import annotations

from pathlib import Path


def program_of(model_type: object) -> str | None:
    """Return the source of the template for models of this `model_type`; None: there is none."""
    path = Path(__file__).with_name(f"{model_type}.jinja")
    known = isinstance(model_type, str) and model_type.isidentifier() and path.exists()
    return path.read_text(encoding="utf-8") if known else None
