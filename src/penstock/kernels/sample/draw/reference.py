"""The definition of `draw`: one row at a time, as the host samples."""
from __future__ import annotations

from torch import Tensor

from penstock.kernels.sample import filters, uniform


def draw(logits_BV: Tensor, token_B: Tensor, row_B: Tensor, position_B: Tensor, params_R4: Tensor,
         stream_R2: Tensor) -> None:
    for b, (row, position) in enumerate(zip(row_B.tolist(), position_B.tolist(), strict=True)):
        temperature, top_k, top_p, min_p = params_R4[row].tolist()
        if position < 0 or not temperature > 0:
            continue
        w_1V = filters.weights(logits_BV[b:b + 1], [temperature], [int(top_k)], [top_p], [min_p])
        key, used = stream_R2[row].tolist()
        token_B[b] = filters.draw(w_1V, [uniform.uniform(key, used)])[0]
        stream_R2[row, 1] += 1
