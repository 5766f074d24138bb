"""What a GPU's memory is taken for, noted while an engine starts.

Knows only sizes: each part is what torch has reserved since the one before.
"""
from __future__ import annotations

import torch

from penstock.exec.load.sizing import show_size

WORDS = {"weights": "weights", "kernels": "kernels' workspaces", "kv": "KV with hot buffers",
         "tables": "page tables and states of requests", "graphs": "CUDA graphs",
         "other": "CUDA itself, compiled kernels and other processes"}


class MemoryUse:
    """`parts`: bytes by name, of WORDS. On a CPU there are none, and nothing is asked of torch."""

    def __init__(self, *, cuda: bool) -> None:
        self.parts: dict[str, int] = {}
        self._cuda, self._outside = cuda, 0
        self._reserved = torch.cuda.memory_reserved() if cuda else 0

    def took(self, part: str, outside: int = 0) -> None:
        """What was reserved since the last call is for `part`, and `outside` bytes that torch knows nothing of."""
        if not self._cuda:
            return
        torch.cuda.empty_cache()                # freed blocks are no part of it
        reserved = torch.cuda.memory_reserved()
        self.parts[part] = self.parts.get(part, 0) + reserved - self._reserved + outside
        self._reserved, self._outside = reserved, self._outside + outside

    def ended(self, workspace: int = 0) -> str:
        """The last part is whatever else the GPU has no room for. Returns a line; workspace: bytes that the
        largest step takes for a while. On a CPU it is empty."""
        if not self._cuda:
            return ""
        free, total = torch.cuda.mem_get_info()
        self.parts["other"] = total - free - self._reserved - self._outside
        taken = ", ".join(f"{show_size(n)} {WORDS[part]}" for part, n in self.parts.items())
        later = f"; the largest step takes up to {show_size(workspace)} more" if workspace else ""
        return f"GPU memory in use: {show_size(total - free)}, of which {taken}{later}"

    def info(self) -> dict[str, int]:
        """Return the parts in bytes, by their names in /server_info."""
        return {f"gpu_{part}_bytes": n for part, n in self.parts.items()}
