"""The matrices of a layer's experts, out of one tensor for all experts or out of one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specmamba.kernels.linear import Matrix, QuantizedMatrix
from specmamba.layers.feed_forward import Experts
from specmamba.models.weights import Weights
from specmamba.parallel.share import Segment


class ExpertMatrices:
    """Takes the matrices of E experts, width -> inner -> width.

    A rank has some of the inner channels of each, or, with ``--ep-size``, all of some of the experts.
    """

    def __init__(self, weights: Weights, num_experts: int, width: int, inner: int, each: str = "") -> None:
        """Say what is to be taken.

        Args:
            weights: of the model.
            num_experts: E.
            width: of the vectors that experts take and give.
            inner: channels between an expert's projections.
            each: where there is no tensor of all experts, they are named ``each``e.name.weight for every expert e; ends
                in a dot. Empty: there must be one of all experts.
        """
        self._weights, self._num_experts, self._each = weights, num_experts, each
        self._width, self._inner = width, inner
        self._channels = Segment("channels between an expert's projections", inner, 1, "uneven")
        self._experts = Segment("experts", num_experts, 1, "uneven")
        self._is_whole = weights.options.divides_experts and weights.share.size > 1  # what a rank has of an expert
        self._own = weights.share.units(self._experts) if self._is_whole else range(num_experts)

    def up(self, stacked: str, names: Sequence[str]) -> Matrix:
        """The projections ``names`` from the width, one below the other: [E, names * inner, width].

        ``stacked``: the name of the tensor of all experts.

        Raises:
            CheckpointError: a tensor is missing or misshapen.
            ConfigError: the channels cannot be divided.
        """
        return self._take(stacked, names, self._inner, self._width, outputs=[self._channels])

    def down(self, stacked: str, name: str = "") -> Matrix:
        """The projection back: [E, width, inner]; as ``up``."""
        return self._take(stacked, [name], self._width, self._inner, inputs=[self._channels])

    def layer(self, up: Matrix, down: Matrix, activation: Callable[[Tensor], Tensor]) -> Experts:
        """Make a layer of both; ``activation`` as for ``Experts``."""
        w, layout = self._weights, self._weights.options.layout_device
        own = (self._own, self._num_experts) if self._is_whole else None
        made = Experts(up, down, activation, w.form, w.options.dtype, layout, w.ranks, own)
        w.replace_bytes(made.nbytes, up, down)
        return made

    def _take(
        self,
        stacked: str,
        names: Sequence[str],
        out: int,
        width: int,
        outputs: Sequence[Segment] = (),
        inputs: Sequence[Segment] = (),
    ) -> Matrix:
        """Matrices [out, width] of all experts, [E, names * out, width]; they stay in codes if all mean the same."""
        w, stack = self._weights, [self._experts] if self._is_whole else []
        outputs, inputs = ((), ()) if self._is_whole else (outputs, inputs)
        if not self._each or w.reader.has(stacked):
            of_all, shape = [*outputs] * len(names), (self._num_experts, len(names) * out, width)
            return w.take_matrix(stacked, *shape, outputs=of_all, inputs=inputs, stack=stack)
        own = [f"{self._each}{expert}.{name}.weight" for expert in self._own for name in names]
        self._leave_others(names, out, width)
        if w.keeps_codes and all(map(w.reader.is_coded, own)):
            matrices = [w.take_matrix(name, out, width, outputs=outputs, inputs=inputs) for name in own]
            return self._stacked(own, matrices)
        made = None
        for place, name in enumerate(own):
            w.reader.note_run_form(name, "" if w.form == "plain" else w.form)
            matrix = w.take_as_numbers(name, out, width, outputs=outputs, inputs=inputs)
            if made is None:
                made = matrix.new_empty(len(own), *matrix.shape)
            made[place] = matrix
        assert made is not None
        return made.view(len(self._own), -1, made.shape[-1])

    def _leave_others(self, names: Sequence[str], out: int, width: int) -> None:
        """Count the experts that other ranks have, and read nothing of them."""
        others = sorted({*range(self._num_experts)} - {*self._own})
        for name in (f"{self._each}{expert}.{name}.weight" for expert in others for name in names):
            self._weights.leave(name, out, width)

    def _stacked(self, names: Sequence[str], matrices: Sequence[Matrix]) -> Matrix:
        w, number = self._weights, len(self._own)
        coded = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        if len(coded) == len(matrices) and all(matrix.is_like(coded[0]) for matrix in coded):
            return QuantizedMatrix.cat(coded, 0).stacked(number)
        for name in names:
            w.reader.note_run_form(name, "")
        dense = [x if isinstance(x, Tensor) else x.dequantize(w.options.dtype) for x in matrices]
        return w.keep_instead(torch.stack(dense).view(number, -1, dense[0].shape[-1]), *matrices)
