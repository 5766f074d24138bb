"""The yardstick: the same weights in Hugging Face transformers, in this process."""
from __future__ import annotations

import time

from penstock.bench.report import optional
from penstock.config.settings.tree import Config


class Transformers:
    """`generate`, greedy, batch 1, KV cache on, with the engine's dtype and number of threads."""

    name = "transformers"

    def __init__(self, config: Config) -> None:
        transformers = optional("transformers")
        import torch

        from penstock.model.weights.checkpoint import open_checkpoint
        from penstock.model.weights.locate import files_of
        torch.set_num_threads(config.device.threads or torch.get_num_threads())
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        checkpoint = open_checkpoint(files_of(config.model))
        settings = dict(checkpoint.config)
        kind = settings.pop("model_type")
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **settings), dtype=dtype)
        left = self._model.load_state_dict(dict(checkpoint.tensors()), strict=False)
        missing = [n for n in left.missing_keys if n != "lm_head.weight"]
        assert not missing and not left.unexpected_keys, f"weights differ: {missing}"
        self._model.tie_weights()
        self._model.eval()
        # Nothing but the length ends a run, and nothing but argmax picks a token.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0)

    def once(self, prompt: list[int], new: int) -> float:
        """Seconds for `new` tokens after `prompt`, prefill included."""
        torch = self._torch
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids),
                                       min_new_tokens=new, max_new_tokens=new)
        assert out.shape[1] == len(prompt) + new
        return time.perf_counter() - start
