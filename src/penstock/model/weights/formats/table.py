"""The table of quantised formats: `quant_method` of a config.json to its reader."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.formats.blocks import BlocksReader, RowsReader, fp8_reader
from penstock.model.weights.formats.compressed import CompressedReader
from penstock.model.weights.formats.gptq import AwqReader, GptqReader
from penstock.model.weights.formats.reader import WeightReader
from penstock.model.weights.fp8 import MXFP4, Blocks

READERS: dict[str, Callable[[Mapping[str, Any], str], WeightReader]] = {
    "fp8": fp8_reader,
    "fbgemm_fp8": RowsReader,
    "compressed-tensors": CompressedReader,
    "awq": AwqReader,
    "gptq": GptqReader,
    "auto-round": GptqReader,
}


def format_of(config: Mapping[str, Any]) -> str:
    """Return `quant_method` of a config.json, read here or not; "" of weights that are floats."""
    given = config.get("quantization_config") or {}
    return str(given.get("quant_method", "") if isinstance(given, dict) else given)


def reader_of(config: Mapping[str, Any], where: str) -> WeightReader | None:
    """Return the reader of a model's quantised weights; None: they are floats, or experts in MXFP4, see
    `weights.mxfp4`. Raises ConfigError: a format that is not read."""
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given
    if method == MXFP4:
        return None
    if not isinstance(given, dict) or method not in READERS:
        raise ConfigError(f"{where}: quantised with {show(method)}, which is not supported; take the "
                          f"unquantised checkpoint, one in {', '.join(READERS)} or {MXFP4}, or a GGUF")
    return READERS[method](given, where)


def read_blocks(config: Mapping[str, Any], where: str) -> Blocks | None:
    """Return the blocks of weights in fp8; None of others. Raises ConfigError: a format that is not read."""
    reader = reader_of(config, where)
    return reader.blocks if isinstance(reader, BlocksReader) else None
