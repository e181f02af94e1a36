"""What drafters have in common that copy from texts and have no weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, DraftTree
from specmamba.draft.drafter import Drafter, NoDrafter, chain_shape, root_tree, tree_shape
from specmamba.errors import ConfigError


class TextDrafter(Drafter):
    """Drafts from the known tokens of each row. Its tables are on the CPU, because the host knows every step's tokens.

    Only the trees go to the device. The trees of a batch are padded to the largest; a row without drafts has its root.
    """

    def __init__(self, max_nodes: int, max_children: int, table: RequestTable) -> None:
        """Allocate the known tokens of all rows.

        Args:
            max_nodes: of a tree, the root included.
            max_children: of a node.
            table: gives the numbers of rows and of positions.
        """
        self.max_nodes = max_nodes
        self._max_children = max_children
        self.stand_in = _Listener(self)
        # the known tokens of the request in each row, its root included
        self._history = torch.zeros(table.num_rows + 1, table.max_positions, dtype=torch.int32)
        self._lengths = torch.zeros(table.num_rows + 1, dtype=torch.int64)

    @abstractmethod
    def _drafts(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens and parents [B, D] int64 of nodes 1 to D of each row's tree, where D is the largest tree's.

        The root is node 0. Rows with fewer nodes end with parents of -1.
        """

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self._lengths[row] = len(tokens)

    def propose(self, batch: Batch) -> DraftTree:
        tokens, parents = self._drafts(batch.rows)
        size, device = len(batch.rows), batch.root_tokens.device
        num_drafts = tokens.shape[1]
        is_chain = bool((parents == torch.arange(num_drafts)).all())
        if is_chain:
            shape = chain_shape(size, num_drafts + 1, device)
        else:
            parents = torch.cat([parents.new_full((size, 1), -1), parents], 1)
            shape = tree_shape(parents.to(device), self._max_children)
        return DraftTree(torch.cat([batch.root_tokens[:, None], tokens.to(device)], 1), shape)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        return root_tree(batch)

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        history, lengths = self._history.numpy(), self._lengths.numpy()
        for row, tokens in zip(rows, decided, strict=True):
            end = int(lengths[row]) + len(tokens)
            history[row, lengths[row] : end] = tokens
            lengths[row] = end


class _Listener(NoDrafter):
    """Tells a text drafter what is decided in steps without drafts."""

    def __init__(self, drafter: TextDrafter) -> None:
        self._drafter = drafter

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        self._drafter.advance(rows, decided)


def read_corpus(
    path: Path, encode: Callable[[str], Sequence[int]], vocab_size: int | None = None, algorithm: str = "ngram"
) -> Tensor:
    """Read the tokens of a text file, [n] int64.

    Args:
        path: the file.
        encode: makes tokens of its text.
        vocab_size: size of the model's vocabulary; None: not checked.
        algorithm: that drafts from it, for messages.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, has no text in it, or tokens that the model does not know.
    """
    flag = f"--speculative-{algorithm}-corpus"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}: {path} is not a UTF-8 text: byte {error.start} of it is not valid") from None
    tokens = torch.tensor(encode(text) if text.strip() else [], dtype=torch.int64)
    if not len(tokens):
        raise ConfigError(f"{flag}: {path} has no text in it; leave the flag out to draft from the request's own text")
    if vocab_size is not None and int(tokens.amax()) >= vocab_size:
        raise ConfigError(
            f"{flag}: the tokenizer makes token {int(tokens.amax())} of {path}, and the model has {vocab_size} tokens"
        )
    return tokens
