"""Trains a GPT model, and says how many rows any tensor had whose columns are the vocabulary."""

from typing import Any, override

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp_plugin.harness import pretrain


class MostRows(TorchDispatchMode):
    """Sees every tensor that an operation makes.

    Attributes:
        rows: The largest number of them.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.rows = 0

    @override
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.dim() and x.size(-1) == self.columns:
                self.rows = max(self.rows, x.numel() // self.columns)
        return result


if __name__ == "__main__":
    with MostRows(columns=128) as seen:
        pretrain.run()
    print(f"at most {seen.rows} rows", flush=True)
