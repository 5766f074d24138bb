"""Finds the files of a model: the demo, a folder, a .gguf file, or a hub id that is already cached.

Reads headers and small JSON files only; imports neither torch nor numpy. Downloads nothing from the
hub (`model/source/hub.py` does), never runs code that comes with a model, and never opens pickled weights.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.config.base.errors import ConfigError, show
from penstock.config.base.paths import hub_cache_dir
from penstock.config.base.sizes import counted
from penstock.config.settings.tree import ModelConfig
from penstock.model.source.demo import DEMO_NAME, fetch_demo
from penstock.model.source.overrides import overridden, overrides_of
from penstock.model.weights.files import read_json_object, read_text
from penstock.model.weights.formats.table import reader_of
from penstock.model.weights.gguf_config import check_config, gguf_eos_ids, read_gguf_config
from penstock.model.weights.gguf_file import GGUFHeader, read_gguf_header
from penstock.model.weights.safetensors_file import read_safetensors_header
from penstock.model.weights.wrappers import RENAMED, Wrapper, is_wrapper, unwrap

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?\Z", re.ASCII)
_SMALL_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where everything of one model is. Exactly one of `gguf` and `safetensors` is given for weights;
    neither for `load_format` dummy, unless the config comes from a GGUF.
    """

    name: str                            # to show and to serve under
    folder: Path
    load_format: str                     # 'safetensors', 'gguf' or 'dummy'
    gguf: Path | None = None
    safetensors: tuple[Path, ...] = ()
    index: Path | None = None            # of the shards, when there are several
    tokenizer: Path | None = None        # tokenizer.json or a .gguf file
    overrides: Mapping[str, Any] = field(default_factory=dict)      # of fields of config.json

    @cached_property
    def gguf_header(self) -> GGUFHeader:
        """Metadata and tensor table of `gguf`. Raises ConfigError."""
        assert self.gguf is not None
        return read_gguf_header(self.gguf)

    @cached_property
    def config(self) -> dict[str, Any]:
        """`own_config` with what overrides it; checked. Raises ConfigError."""
        path = str(self.gguf or self.folder / "config.json")
        config = overridden(self.own_config, self.overrides, inside=self.wrapper is not None)
        if self.gguf is None or self.overrides:
            check_config(config, path)
        return config if self.gguf is not None else self._quantised(config)

    @property
    def own_config(self) -> dict[str, Any]:
        """config.json, of a wrapper its text's, or the GGUF's metadata in the same terms. Raises
        ConfigError."""
        return self._unwrapped[0]

    @property
    def wrapper(self) -> Wrapper | None:
        """What the text model is inside of; None: it is a model of its own. Raises ConfigError."""
        return self._unwrapped[1]

    @cached_property
    def _unwrapped(self) -> tuple[dict[str, Any], Wrapper | None]:
        if self.gguf is not None:
            return read_gguf_config(self.gguf, self.gguf_header), None
        path = self.folder / "config.json"
        if not path.exists():
            raise ConfigError(f"{self.folder}: there is no config.json")
        given = read_json_object(path, _SMALL_BYTES)
        inside = is_wrapper(given)
        return unwrap(given, str(path), self._has_head() if inside else None)

    def _has_head(self) -> bool | None:
        """Whether the files hold a head; None where there are none."""
        if self.index is not None:
            names: Iterable[str] = read_weight_map(self.index)
        else:
            names = [name for path in self.safetensors for name in read_safetensors_header(path)]
        heads = ("lm_head.weight", "lm_head.weight_packed", "lm_head.qweight")
        return any(name.endswith(heads) for name in names) if self.safetensors else None

    def _quantised(self, config: dict[str, Any]) -> dict[str, Any]:
        """With what ModelOpt says in a file of its own. Raises ConfigError: weights in a form that nothing reads."""
        other, where = self.folder / "hf_quant_config.json", self.folder / "config.json"
        if not config.get("quantization_config") and other.exists():
            given = read_json_object(other, _SMALL_BYTES).get("quantization")
            given, where = given if isinstance(given, dict) else {"quant_algo": given}, other
            if given.get("quant_algo") is not None:
                config = {**config, "quantization_config": {**given, "quant_method": "modelopt"}}
            elif given.get("kv_cache_quant_algo") is not None:
                config = {**config, "kv_cache_quant_algo": given["kv_cache_quant_algo"]}
        reader_of(config, str(where))
        return config

    def name_of(self, name: str) -> str | None:
        """Return the model's name for a tensor of the files, None for one of a tower."""
        known = name if self.wrapper is None else self.wrapper.name_of(name)
        for part, ours in RENAMED.get(str(self.config.get("model_type")), ()):
            known = None if known is None else known.replace(part, ours)
        return known

    def towers(self, found: Mapping[str, int]) -> str:
        """Say, for the log, that these towers are not served: how many tensors each has by its name."""
        if not found:
            return "vision tower not served"
        num = sum(found.values())
        return (f"vision tower not served: {counted(num, 'tensor')} of {', '.join(sorted(found))} "
                f"{'is' if num == 1 else 'are'} not read")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, {} where there is none. Raises ConfigError."""
        path = self.folder / "generation_config.json"
        if self.gguf is not None or not path.exists():
            return {}
        return read_json_object(path, _SMALL_BYTES)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: generation_config.json, else config.json, or GGUF metadata.

        May be empty: the tokenizer can know more (`Tokenizer.eos_ids`). Raises ConfigError.
        """
        if self.gguf is not None:
            return gguf_eos_ids(self.gguf_header.metadata, str(self.gguf))
        for name in ("generation_config", "config"):
            value = getattr(self, name).get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
                    raise ConfigError(f"{self.folder}: eos_token_id of {name}.json is {show(value)}; "
                                      "expected a token id or a list of them")
                return tuple(dict.fromkeys(ids))
        return ()


def files_of(model: ModelConfig) -> ModelFiles:
    """The files that a config names, with what overrides them. Raises ConfigError."""
    cache = None if model.download_dir is None else Path(model.download_dir).expanduser().absolute()
    files = locate(model.model, load_format=model.load_format, revision=model.revision, cache=cache)
    return replace(files, overrides=overrides_of(model))


def locate(model: str, *, load_format: str = "auto", revision: str | None = None,
           cache: Path | None = None) -> ModelFiles:
    """The files of `model`: 'demo', a folder, a .gguf file, or a hub id in the local hub cache.

    load_format   'auto', 'safetensors', 'gguf', or 'dummy' (only the config is needed)
    revision      of a hub id: a branch, tag or commit, None: main      cache    of the hub, None: the user's
    Raises        ConfigError: what was given, where was looked, what to do
    """
    if load_format not in ("auto", "safetensors", "gguf", "dummy"):
        raise ConfigError(f"load format {show(load_format)}: expected auto, safetensors, gguf or dummy")
    if not model or "\0" in model:
        raise ConfigError(f"model {show(model)}: expected 'demo', a folder, a .gguf file or a hub id")
    if model == "demo":
        return _gguf(fetch_demo(), DEMO_NAME, load_format)
    path = Path(model).expanduser()
    if revision not in (None, "main") and path.exists():
        raise ConfigError(f"--revision {revision}: {path} is here, and a revision is of a hub id: leave "
                          "it out")
    if path.is_dir():
        return _folder(path, path.resolve().name, load_format)
    if path.is_file():
        return _file(path, load_format)
    return _folder(hub_snapshot(model, revision, cache), model, load_format)


def _gguf(path: Path, name: str, load_format: str) -> ModelFiles:
    if load_format == "safetensors":
        raise ConfigError(f"{path}: a GGUF file, but the load format is safetensors")
    return ModelFiles(name=name, folder=path.parent, gguf=path, tokenizer=path,
                      load_format="dummy" if load_format == "dummy" else "gguf")


def _file(path: Path, load_format: str) -> ModelFiles:
    if path.suffix.lower() in _PICKLED:
        raise ConfigError(_pickle_message(path, [path.name]))
    if path.suffix.lower() == ".safetensors":
        raise ConfigError(f"{path}: weights alone; give the folder that also holds config.json")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    if path.suffix.lower() != ".gguf" and magic != b"GGUF":
        raise ConfigError(f"{path}: not a GGUF file; expected a .gguf file or a model folder")
    return _gguf(path, path.stem, load_format)


def _folder(folder: Path, name: str, load_format: str) -> ModelFiles:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as e:
        raise ConfigError(f"{folder}: cannot be read: {e.strerror}") from None
    ggufs = [n for n in names if n.lower().endswith(".gguf")]
    shards = [n for n in names if n.endswith(".safetensors")]
    if load_format == "gguf" or (load_format == "auto" and not shards and ggufs):
        if len(ggufs) != 1:
            raise ConfigError(f"{folder}: {len(ggufs)} .gguf files; " + (
                f"give one of them by its path: {some(ggufs)}" if ggufs else "expected one"))
        return _gguf(folder / ggufs[0], name, load_format)
    # Also set for a tokenizer of a kind that is not read: opening it then says so.
    found = any(n in names for n in ("tokenizer.json", *OTHER_TOKENIZERS))
    tokenizer = folder / "tokenizer.json" if found else None
    files = ModelFiles(name=name, folder=folder, tokenizer=tokenizer,
                       load_format="dummy" if load_format == "dummy" else "safetensors")
    if "config.json" not in names:
        raise ConfigError(f"{folder}: there is no config.json: not a model folder")
    if load_format == "dummy":
        return files
    index = folder / INDEX if INDEX in names else None
    paths: tuple[Path, ...]
    if SINGLE in names and not (index and _lists_single(index)):
        index, paths = None, (folder / SINGLE,)
    elif index is not None:
        paths = tuple(folder / n for n in dict.fromkeys(read_weight_map(index).values()))
    elif not shards:
        pickled = [n for n in names if n.lower().endswith(_PICKLED)]
        raise ConfigError(_pickle_message(folder, pickled) if pickled else
                          f"{folder}: there are no weights (*.safetensors or *.gguf)")
    else:
        if len(shards) > 1:
            raise ConfigError(f"{folder}: {len(shards)} safetensors files but no {INDEX}")
        index, paths = None, (folder / shards[0],)
    return ModelFiles(name=name, folder=folder, tokenizer=tokenizer, load_format="safetensors",
                      safetensors=paths, index=index)


def _lists_single(index: Path) -> bool:
    """Return whether an index beside `model.safetensors` is of that file and of others that are all here,
    such as a file of MTP layers. Any other is stale, and transformers does not read it either."""
    try:
        return SINGLE in read_weight_map(index).values()
    except ConfigError:
        return False


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file of an index, every file name checked. Raises ConfigError."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: there is no weight_map")
    shards = set()
    for tensor, shard in weight_map.items():
        if shard in shards if isinstance(shard, str) else False:
            continue
        # A plain name in the same folder: a path could name any file of this machine.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise ConfigError(f"{index}: tensor {show(tensor)} is in {show(shard)}; expected the name "
                              "of a file in the same folder")
        if not shard.endswith(".safetensors"):
            raise ConfigError(f"{index}: {show(shard)} is not a safetensors file")
        if not (index.parent / shard).is_file():
            raise ConfigError(f"{index}: the shard {show(shard)} is missing: download it again")
        shards.add(shard)
    return weight_map


def hub_id(model: str) -> bool:
    """Whether it is ORG/NAME, and nothing of that name is here."""
    return _is_id(model) and "/" in model and not Path(model).expanduser().exists()


def _is_id(model: str) -> bool:
    return not (model.lower().endswith((".gguf", ".safetensors", *_PICKLED)) or not _HUB_ID.match(model)
                or "--" in model or ".." in model)


def hub_snapshot(model: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """The folder of hub id `model` in the local hub cache, at the revision that main was, or `revision`.

    The layout is Hugging Face's: models--org--name/{refs/main, snapshots/<revision>/}. Raises
    ConfigError that says where it looked.
    """
    if not _is_id(model):
        raise ConfigError(f"model {show(model)}: no such file or folder")
    cache = cache or hub_cache_dir()
    repo = cache / ("models--" + model.replace("/", "--"))
    snapshots, again = repo / "snapshots", f"run `hf download {model}`"
    if not snapshots.is_dir() and "/" not in model:
        raise ConfigError(f"model {show(model)}: not a folder or a .gguf file here; hub ids look like "
                          "ORG/NAME")
    if not snapshots.is_dir():
        raise ConfigError(f"model {show(model)}: no such folder here, and no such model in the hub cache "
                          f"{cache}: `penstock serve {model}` downloads it where a hub can be reached, and "
                          f"so does `hf download {model}` (set HF_HUB_CACHE if the cache is elsewhere)")
    name = revision or "main"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name, re.ASCII) or ".." in name:
        raise ConfigError(f"--revision {show(name)}: a branch, a tag or a commit is needed")
    ref, found = repo / "refs" / name, name
    if ref.is_file():
        found = read_text(ref, 1024).strip()
        if not re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
            raise ConfigError(f"{ref}: {show(found)} is not a revision")
    elif revision is None:
        revisions = sorted(p.name for p in snapshots.iterdir() if p.is_dir())
        if len(revisions) != 1:
            raise ConfigError(f"{repo}: {len(revisions)} revisions and no refs/main; {again}, or give the "
                              "snapshot's folder")
        found = revisions[0]
    elif not (snapshots / name).is_dir():
        raise ConfigError(f"model {show(model)}: its revision {name} is not in the hub cache {cache}; {again}"
                          f" --revision {name}")
    if not (snapshots / found).is_dir():
        raise ConfigError(f"{snapshots}: revision {found} is incomplete; {again}")
    return snapshots / found


def some(names: list[str]) -> str:
    """The first few of some names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _pickle_message(path: Path, names: list[str]) -> str:
    return (f"{path}: {some(names)}: pickled weights can run code when they are read and are never "
            "loaded; convert them to safetensors where you trust them, e.g. with transformers' "
            "save_pretrained")
