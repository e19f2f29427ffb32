"""The operators that torch runs within a context."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Attributes: calls: how often each operator ran, by name."""

    def __init__(self, see: Callable[[str, Any, list[Tensor]], object] = lambda *_: None) -> None:
        """Args: see: gets each operator's name, arguments and the tensors that it returned."""
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        self._see(name, args, [x for x in tree_leaves(result) if isinstance(x, Tensor)])
        return result
