"""The table of quantised formats: `quant_method` of a config.json to its reader."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.blocks import RowsReader, fp8_reader
from penstock.model.weights.formats.compressed import CompressedReader
from penstock.model.weights.formats.gptq import AwqReader, GptqReader
from penstock.model.weights.formats.modelopt import ModelOptReader
from penstock.model.weights.formats.mxfp4 import Mxfp4Reader
from penstock.model.weights.formats.reader import Format, WeightReader

READERS: dict[str, Callable[[Mapping[str, Any], str], WeightReader]] = {
    "fp8": fp8_reader,
    "mxfp8": fp8_reader,
    "fbgemm_fp8": RowsReader,
    "compressed-tensors": CompressedReader,
    "awq": AwqReader,
    "gptq": GptqReader,
    "auto-round": GptqReader,
    "modelopt": ModelOptReader,
    "mxfp4": Mxfp4Reader,
}


def method_of(config: Mapping[str, Any]) -> str:
    """Return `quant_method` of a config.json, read here or not; "" of weights that are floats."""
    given = config.get("quantization_config") or {}
    return str(given.get("quant_method", "") if isinstance(given, dict) else given)


def kv_format_of(config: Mapping[str, Any]) -> str:
    """Return the format that a checkpoint asks for its KV: "fp8_e4m3", another one in the words of its file, or "": it
    asks for none. Its static scales are not needed, as each vector has its own."""
    given = config.get("quantization_config")
    given = {**config, **(given if isinstance(given, dict) else {})}
    scheme = given.get("kv_cache_scheme")
    said = str(f"{scheme.get('type')}{scheme.get('num_bits')}" if isinstance(scheme, dict) else
               given.get("kv_cache_quant_algo") or "")
    return "fp8_e4m3" if said.lower() in ("fp8", "float8") else said


def reader_of(config: Mapping[str, Any], where: str) -> WeightReader | None:
    """Return the reader of a model's quantised weights; None: they are floats. Raises ConfigError: a format
    that is not read."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if not isinstance(given, dict) or method not in READERS:
        raise ConfigError(f"{where}: quantised with {show(method)}, which is not supported; take the "
                          f"unquantised checkpoint, one in {', '.join(READERS)}, or a GGUF")
    return READERS[method](given, where)


def format_of(config: Mapping[str, Any], where: str) -> Format | None:
    """Return how a model's weights may stay packed; None: they become floats. Raises ConfigError as `reader_of`
    does."""
    reader = reader_of(config, where)
    return None if reader is None else reader.format
