"""The hybrid that lab/recall trains is a qwen3_next: same names, same logits."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

RECALL = Path(__file__).parents[2] / "lab" / "recall"


@torch.no_grad()
def test_what_is_trained_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks, with weights in which words are forgotten and written everywhere."""
    monkeypatch.syspath_prepend(str(RECALL))
    import hybrid
    import net
    torch.manual_seed(0)
    trained = hybrid.Recall()
    for name, weight in trained.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "conv1d.weight")):
            torch.nn.init.normal_(weight, std=0.1)
        elif name.endswith(("A_log", "dt_bias")):
            weight.add_(4)
    reference = Qwen3NextForCausalLM(Qwen3NextConfig(**hybrid.CONFIG)).float().eval()
    reference.load_state_dict(trained.state_dict())
    ids_BT = torch.randint(hybrid.words.VOCAB, (2, 5 * hybrid.CHUNK))
    got, _ = trained(ids_BT, net.How("dense", ids_BT.shape[1], 0, ids_BT.device))
    torch.testing.assert_close(got, reference(ids_BT).logits, rtol=0, atol=1e-4)
