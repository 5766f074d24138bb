"""Downloads a model by its hub id, ORG/NAME, into the cache that Hugging Face's tools share.

Owns which files are needed and what a failure says. `huggingface_hub`, an optional library, owns the
protocol: the token, the layout of the cache, resumed downloads. For a model that is in the cache nothing is
asked of the hub.
"""
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from penstock.config.base.errors import ConfigError
from penstock.config.base.paths import hub_cache_dir, hub_endpoint, hub_is_offline
from penstock.config.settings.tree import Config
from penstock.model.weights.locate import INDEX, SINGLE, hub_id, hub_snapshot, locate, some

SMALL = (".json", ".jinja", ".model", ".txt")       # configs, tokenizers, templates
NOT_SMALL = ("pytorch_model.bin.index.json", "README.txt", "requirements.txt")
AT_ONCE = 4                 # files that come at the same time
PROGRESS_S = 5.0            # between two lines that say how far it is
INSTALL = "pip install huggingface_hub"


def pull(config: Config, say: Callable[[str], object]) -> None:
    """Download what MODEL, --tokenizer and --speculative-model name on the hub and the cache has not.

    say      takes one line at a time: what is downloaded, how far it is
    Raises   ConfigError: it cannot be downloaded, and what to do
    """
    model, draft = config.model, config.schedule.speculative_model
    cache = None if model.download_dir is None else Path(model.download_dir).expanduser().absolute()
    wanted = [(model.model, model.load_format, model.revision, cache)]
    if draft is not None:
        wanted.append((draft, "auto", None, None))
    for name, load_format, revision, folder in wanted:
        if hub_id(name):
            try:
                locate(name, load_format=load_format, revision=revision, cache=folder)
            except ConfigError:
                _Download(name, revision, folder or hub_cache_dir(), say).model(load_format)
    if model.tokenizer is not None and hub_id(model.tokenizer):
        try:
            hub_snapshot(model.tokenizer)
        except ConfigError:
            _Download(model.tokenizer, None, hub_cache_dir(), say).small()


class _Download:
    """One repository of the hub, at one revision."""

    def __init__(self, name: str, revision: str | None, cache: Path, say: Callable[[str], object]) -> None:
        """Lists its files. Raises ConfigError: no hub can be reached, or it has no such model for us."""
        self.name, self.revision, self.cache, self.say = name, revision or "main", cache, say
        elsewhere = f"`hf download {name}` gets it where a hub can be reached; or give the folder of a model"
        if hub_is_offline():
            raise ConfigError(f"model {name}: not in the hub cache {cache}, and HF_HUB_OFFLINE is set: unset "
                              f"it, or {elsewhere}")
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ImportError:
            raise ConfigError(f"model {name}: not in the hub cache {cache}, and huggingface_hub is not "
                              f"installed: {INSTALL}; {elsewhere}") from None
        self.hub, self.errors, self.elsewhere = huggingface_hub, errors, elsewhere
        # The second is what the library's client raises without an answer, whichever client it is.
        self.failures: tuple[type[Exception], ...] = (
            OSError, *errors.HfHubHTTPError.__bases__, errors.XetDownloadError)
        self.endpoint = hub_endpoint()
        try:
            info = huggingface_hub.HfApi(endpoint=self.endpoint).model_info(
                name, revision=self.revision, files_metadata=True)
        except self.failures as e:
            self._refuse(e)
        found = {s.rfilename: s.size or 0 for s in info.siblings or ()}
        self.sizes = {name: size for name, size in found.items() if "/" not in name}

    def model(self, load_format: str) -> None:
        """Its config, tokenizer, templates and weights. Raises ConfigError."""
        weights = [n for n in self.sizes if n.endswith(".safetensors")]
        ggufs = [n for n in self.sizes if n.lower().endswith(".gguf")]
        if load_format == "gguf" or (load_format == "auto" and ggufs and not weights):
            if len(ggufs) != 1:
                raise ConfigError(f"model {self.name}: {len(ggufs)} .gguf files ({some(sorted(ggufs))}): run "
                                  f"`hf download {self.name} FILE` with one of them, and give its path")
            self._get(ggufs)
            return
        if load_format != "dummy" and not weights:
            raise ConfigError(f"model {self.name}: its repository has no safetensors and no .gguf file, only "
                              f"{some(sorted(self.sizes)) or 'none'}: penstock loads no other weights")
        self.small()
        if load_format == "dummy":
            return
        if SINGLE in weights:
            weights = [SINGLE]
        elif INDEX in self.sizes:
            weights = self._listed(weights)
        self._get(weights)

    def small(self) -> None:
        """All but the weights. Raises ConfigError."""
        self._get([n for n in self.sizes if n.endswith(SMALL) and n not in NOT_SMALL])

    def _listed(self, weights: list[str]) -> list[str]:
        """Shards that the index lists; all, where it cannot be read: opening it says why."""
        try:
            path = hub_snapshot(self.name, self.revision, self.cache) / INDEX
            listed = set(json.loads(path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return weights
        return [n for n in weights if n in listed]

    def _get(self, files: Iterable[str]) -> None:
        """Into the cache; those that are there already are not asked for again. Raises ConfigError."""
        names = list(files)
        progress = _Progress(self.name, names, sum(self.sizes[n] for n in names), self.say)
        left, came, failed = names[::-1], list[str](), list[Exception]()

        def fetch() -> None:
            while left and not failed:
                name = left.pop()
                try:
                    self.hub.hf_hub_download(self.name, name, revision=self.revision, cache_dir=self.cache,
                                             endpoint=self.endpoint, tqdm_class=progress.bar(self.hub))
                    came.append(name)
                except self.failures as e:
                    failed.append(e)

        # Daemons: a Ctrl-C does not wait for gigabytes.
        threads = [threading.Thread(target=fetch, daemon=True) for _ in names[:AT_ONCE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed or len(came) < len(names):
            self._refuse(failed[0] if failed else OSError("a thread has ended"))
        progress.done()

    def _refuse(self, error: Exception) -> NoReturn:
        errors, where = self.errors, f"{self.endpoint}/{self.name}"
        if isinstance(error, errors.GatedRepoError):
            raise ConfigError(f"model {self.name}: gated: accept its terms at {where}, and set HF_TOKEN to a "
                              "token of yours, or run `hf auth login`") from None
        if isinstance(error, errors.RevisionNotFoundError):
            raise ConfigError(f"model {self.name}: the hub has no revision {self.revision} of it: see "
                              f"{where}") from None
        if isinstance(error, errors.RepositoryNotFoundError):
            raise ConfigError(f"model {self.name}: not on the hub {self.endpoint}, or private: see how it is "
                              "spelled, or set HF_TOKEN to a token that may read it") from None
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"model {self.name}: downloading from {self.endpoint} failed: {said}: start again "
                          f"to go on with it; {self.elsewhere}") from None


class _Progress:
    """Bytes of several files together, logged every PROGRESS_S."""

    def __init__(self, name: str, files: list[str], total: int, say: Callable[[str], object]) -> None:
        self._name, self._total, self._say = name, total, say
        self._lock, self._have, self._told = threading.Lock(), 0, time.monotonic()
        if files:
            say(f"{name}: downloading {some(files)} ({_size(total)})")

    def bar(self, hub: Any) -> type:
        """A class that the library takes for a progress bar, which draws nothing."""
        add = self._add

        class Counted(hub.utils.tqdm):      # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})
                add(kwargs.get("initial") or 0)

            def update(self, n: float | None = 1) -> None:
                add(int(n or 0))

        return Counted

    def _add(self, n: int) -> None:
        with self._lock:
            self._have += n
            now = time.monotonic()
            if now - self._told < PROGRESS_S:
                return
            self._told = now
            share = 100 * self._have // max(self._total, 1)
        self._say(f"{self._name}: {_size(self._have)} of {_size(self._total)} ({min(share, 100)} %)")

    def done(self) -> None:
        if self._total:
            self._say(f"{self._name}: downloaded")


def _size(n: int) -> str:
    return f"{n / (1 << 30):.1f} GiB" if n >= 1 << 30 else f"{n / (1 << 20):.1f} MiB"
