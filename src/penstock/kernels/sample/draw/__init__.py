"""draw: the next token of rows with a temperature, on a CUDA device, without asking the host.

    draw(logits_BV, token_B, row_B, position_B, params_R4, stream_R2)

    logits_BV    float32, not changed    token_B  int64: overwritten for rows that draw; others keep theirs
    row_B        int32, into the tables  position_B  int32; below 0 the row is padding
    params_R4    float64: temperature (0: the row draws nothing), top_k (V: off), top_p, min_p
    stream_R2    int64: key of the row's uniforms, and how many of them it has used, which grows by one

The definition is `exec.sampling.filters` and `exec.sampling.uniform`: temperature, min-p, top-k, top-p, ties
at an edge keep the lowest ids, inverse CDF in order of token id. Sums are made in float64, in another order
than there.

    B rows of the step   R rows of the tables   V vocabulary
"""
