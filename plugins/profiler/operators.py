"""Count the operators of a forward."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Counts the operators of one forward, and the elements of its largest logits."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.logits, self.tokens = 0, 0, tokens
        self._vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and count it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operators += 1
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] == self._vocabulary:
            self.logits = max(self.logits, result.numel())
        return result
