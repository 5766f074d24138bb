"""The tokenizer as grammars need it, in the engine process."""
from __future__ import annotations

from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config
from penstock.exec.sampling.grammar import BadGrammar, Vocabulary, switched_off
from penstock.model.weights.locate import files_of
from penstock.text.tokenizer import Tokenizer, open_tokenizer


def vocabulary_of(config: Config) -> Vocabulary | None:
    """None: the model has no tokenizer. Raises BadGrammar: there shall be no grammars, or the tokenizer is
    broken, which the API process tells."""
    model = config.model
    if model.grammar_backend == "none":
        return switched_off()
    try:
        found = open_tokenizer(files_of(model), model.tokenizer)
    except ConfigError as e:
        raise BadGrammar(str(e)) from None
    return None if found is None else of_tokenizer(found)


def of_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.raw.to_str(), tokenizer.eos_ids)
