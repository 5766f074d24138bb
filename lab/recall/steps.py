"""Steps of fixed shapes: a CUDA graph each where one can be captured, eager elsewhere."""

from collections.abc import Callable

import torch
from torch import Tensor


class Captured:
    """`work`, which reads tensors that stay where they are and returns new ones.

    `pool`: of `torch.cuda.graph_pool_handle()`, shared by graphs that run one after the other; None for one
    of its own. `eager`: nothing is captured. What a call returns, the next call of any of them overwrites.
    """

    def __init__(
        self,
        work: Callable[[], tuple[Tensor, ...]],
        opt: torch.optim.Optimizer,
        pool: object = None,
        *,
        eager: bool,
    ) -> None:
        self.work, self.opt, self.pool, self.eager = work, opt, pool, eager
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.why = 0, ""

    def __call__(self) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.graph is None and not self.eager and self.calls > 3:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
            return self.result
        if self.eager:
            return self.work()
        aside = torch.cuda.Stream()  # what is captured must have run before, beside the default stream
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            result = self.work()
        torch.cuda.current_stream().wait_stream(aside)
        return result

    def capture(self) -> None:
        """`why` says what was in the way, if anything was."""
        graph = torch.cuda.CUDAGraph()
        self.opt.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self.result = self.work()
            self.graph = graph
        except RuntimeError as error:
            self.eager, self.why = True, str(error)[:300]
            self.opt.zero_grad(set_to_none=True)
