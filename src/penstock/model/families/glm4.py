"""GLM-4.5 to 4.7: grouped attention that turns half of a head, experts as DeepSeek-V3 has them."""
from __future__ import annotations

from dataclasses import replace

from penstock.model.families.common import layers_of, read_attention, read_spec
from penstock.model.families.deepseek import grouped_experts
from penstock.model.mtp import deepseek_names
from penstock.model.rope import rotated_dim
from penstock.model.spec import Spec
from penstock.model.weights.fields import Fields

PARTIAL = 0.5               # of a head that is turned


def glm4_moe(fields: Fields) -> Spec:
    attention = read_attention(fields, kv_heads=8, qkv_bias=fields.flag("attention_bias"), out_bias=False,
                               qk_norm=fields.flag("use_qk_norm"))
    attention = replace(attention, rotated=rotated_dim(fields, attention.head_dim, PARTIAL))
    dense = fields.size("first_k_dense_replace", 1, least=0)
    shared = fields.size("moe_intermediate_size", 1408) * fields.size("n_shared_experts", 1)
    moe = grouped_experts(fields, frozenset(i for i in layers_of(fields) if i >= dense), scale=1.0,
                          shared=shared)
    skipped = fields.size("num_nextn_predict_layers", fields.size("num_mtp_layers", 0, least=0), least=0)
    return read_spec(fields, attention, moe=moe, partial=PARTIAL, skipped_layers=skipped,
                     reads=("partial_rotary_factor", "use_qk_norm"),
                     mtp=deepseek_names(fields.size("num_hidden_layers")) if skipped else None)
