"""The processes that share a model, as one of them sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from specmamba.kernels.exchange import Count


class Ranks:
    """Processes with one part of a model each. This class is one process that has the whole of it.

    With one rank every call gives its argument back. A class of its own exchanges tensors (``process_group.py``), so
    that a single process never imports what several of them need. Sizes of a part can be computed with any number of
    ranks; an exchange between them needs that class.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """rank: of this process, from 0 on; size: the number of ranks."""
        self.rank, self.size = rank, size

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all: it has the requests, the clock and the random choices."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over all ranks; x may be overwritten. Every rank gets the same bits."""
        self._require_one()
        return x

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Join the parts of all ranks along the last dimension.

        Args:
            x: [..., widths[rank]], this rank's part.
            widths: of the parts of all ranks.

        Returns:
            [..., sum(widths)].
        """
        self._require_one()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite a tensor with that of rank 0, which has the same shape and dtype; gives x."""
        self._require_one()
        return x

    def smallest(self, number: int) -> int:
        """The smallest of one number of every rank."""
        self._require_one()
        return number

    def agree(self, what: str, value: str) -> None:
        """Compare a text with those of the other ranks.

        Raises:
            ConfigError: they differ; ``what`` names the text in the message.
        """
        self._require_one()

    @property
    def is_recordable(self) -> bool:
        """Whether exchanges can be a part of captured steps."""
        return self.size == 1

    def counts(self) -> Mapping[str, Count] | None:
        """What was exchanged over shared memory so far, by kind; None: nothing goes over it."""
        return None

    def tell(self, message: bytes) -> bool:
        """Send a message of rank 0 to all others; whether there is a faster way for it than a connection's.

        Raises:
            RuntimeError: a rank has ended.
        """
        return False

    def told(self, milliseconds: int) -> bytes | None:
        """The next message that ``tell`` has sent; None: there was none in this time. Raises RuntimeError likewise."""
        return None

    def end(self) -> None:
        """Let exchanges that wait for a rank that is lost fail, as far as nothing else ends them; from any thread."""

    def close(self) -> None:
        """Leave the others, which leave at the same time."""

    def abort(self) -> None:
        """Leave without waiting, where another rank is lost. Exchanges that still run fail."""

    def _require_one(self) -> None:
        if self.size > 1:
            raise RuntimeError(f"{type(self).__name__} of {self.size} ranks has sizes only, and exchanges nothing")


ONE_RANK = Ranks()
