"""Turn the tensors of a checkpoint into the parts of a model, and the parts into a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape, KVShape, StateShape
from specmamba.checkpoints.tensor_reader import DTYPES, TensorReader, have_same_values
from specmamba.errors import CheckpointError
from specmamba.kernels import gpu, linear, moe
from specmamba.kernels.linear import Matrix, PackedCodes, QuantizedMatrix, WeightForm
from specmamba.kernels.linear.grouped import form_name, name_of_rounded
from specmamba.layers.primitives import Embedding, GatheredLinear, Linear, RMSNorm, Rotary, SummedLinear
from specmamba.layers.rotary_frequencies import rotary_frequencies
from specmamba.models.base import LoadedModel, LoadOptions
from specmamba.models.hybrid import Block, HybridTarget, MTPHead
from specmamba.models.rank_shapes import own_kv, own_state
from specmamba.parallel.share import Part, Segment, Share

MatrixT = TypeVar("MatrixT", Tensor, QuantizedMatrix)


class Weights:
    """Takes tensors out of a checkpoint, makes layers of them, and counts the parameters and bytes that are kept.

    Where several ranks share the model, matrices are asked for by their whole shapes and the segments that are divided,
    and no more than the rank's part is read. Vectors are taken whole, and ``part`` leaves the rank's own. Parameters
    are counted of the whole model, bytes of the part.
    """

    def __init__(self, config: Any, reader: TensorReader, options: LoadOptions, form: WeightForm | None = None) -> None:
        """config: the text part of the config; form: how matrices are stored, None: as the target's."""
        self.config = config
        self.reader = reader
        self.options = options
        self.form: WeightForm = options.form if form is None else form
        self.keeps_codes = options.keeps_codes if form is None else options.draft_keeps_codes
        self.ranks = options.ranks
        self.share = Share(options.ranks.rank, options.ranks.size)
        self.num_parameters = 0
        self.num_bytes = 0
        self.max_length: int = getattr(config, "max_position_embeddings", 0)  # of texts
        self._embedding_name = ""  # that was taken last

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Load a tensor of this shape onto the device; ``dtype``: None is the model's.

        Raises:
            CheckpointError: it is missing, unreadable or misshapen, or the shape has a size of 0.
        """
        return self._take_part(name, shape, dtype or self.options.dtype)

    def _take_part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None = None) -> Tensor:
        _require_elements(name, shape)
        own = self.reader.take(name, shape, dtype, part)
        return self._count(own.to(self.options.device, dtype), prod(shape))

    def take_matrix(
        self,
        name: str,
        *shape: int,
        outputs: Sequence[Segment] = (),
        inputs: Sequence[Segment] = (),
        order: Tensor | None = None,
        stack: Sequence[Segment] = (),
    ) -> Matrix:
        """Load a matrix that products multiply by, or this rank's part; in its codes where it is stored and runs so.

        Args:
            name: of the tensor.
            shape: [..., out, in], of the whole.
            outputs: segments of ``out`` that a rank has its part of; none: all.
            inputs: the same of ``in``; one of the three is divided at the most.
            order: [out] int64, where each of the outputs is stored; None: there.
            stack: segments of the first dimension of stacked matrices.

        Raises:
            CheckpointError: as ``take``.
            ConfigError: it cannot be divided so.
        """
        part = self.share.part(inputs, -1) if inputs else self._part_of_outputs(shape[-2], outputs, order)
        part = self.share.part(stack, 0) if stack else part
        if not (self.keeps_codes and self.reader.is_coded(name)):
            self.reader.note_run_form(name, self._rounded(self.form))
            return self._take_part(name, shape, self.options.dtype, part)
        _require_elements(name, shape)
        found = self.reader.take_quantized(name, shape, part)
        if isinstance(found, QuantizedMatrix):
            self.reader.note_run_form(name, form_name(found, gpu.multiplies_codes(self.options.layout_device)))
            return self._count(found.to(self.options.device), prod(shape))
        return self._count(found.to(self.options.device, self.options.dtype), prod(shape))

    def take_as_numbers(
        self, name: str, *shape: int, outputs: Sequence[Segment] = (), inputs: Sequence[Segment] = ()
    ) -> Tensor:
        """As ``take_matrix``, and never in codes."""
        part = self.share.part(inputs, -1) if inputs else self._part_of_outputs(shape[-2], outputs)
        return self._take_part(name, shape, self.options.dtype, part)

    def leave(self, name: str, *shape: int) -> None:
        """Count the parameters of a tensor that another rank takes. Raises CheckpointError: there is none."""
        self.reader.leave(name, shape)
        self.num_parameters += prod(shape)

    def _part_of_outputs(self, size: int, outputs: Sequence[Segment], order: Tensor | None = None) -> Part | None:
        if not outputs:
            return None if order is None else Part(-2, order)
        assert sum(segment.size for segment in outputs) == size
        return self.share.part(outputs, -2, order)

    @overload
    def part(self, x: Tensor, *segments: Segment, dim: int = 0) -> Tensor: ...
    @overload
    def part(self, x: Matrix, *segments: Segment, dim: int = 0) -> Matrix: ...
    def part(self, x: Matrix, *segments: Segment, dim: int = 0) -> Matrix:
        """Keep this rank's part of a small tensor that was taken, whose dimension ``dim`` consists of these segments.

        Raises:
            ConfigError: it cannot be divided so.
        """
        if self.share.size == 1:
            return x
        own = self.share.cut(x, segments, dim)
        self.replace_bytes(own.nbytes, x)
        return own

    def take_embedding(self, name: str) -> Matrix:
        """Load the embedding of tokens [V, H]; in its codes where they can be kept. Errors as ``take``."""
        matrix = self.take_matrix(name, self.config.vocab_size, self.config.hidden_size)
        if isinstance(matrix, QuantizedMatrix):
            if linear.keeps_rows(matrix, self.options.layout_device):
                return matrix
            matrix = self.keep_instead(matrix.dequantize(self.options.dtype), matrix)
        self._embedding_name = name
        self.reader.note_run_form(name, "")
        return matrix

    def _rounded(self, form: WeightForm) -> str:
        """The name of the form in which a matrix runs that is rounded when it is loaded."""
        return name_of_rounded(form, gpu.multiplies_codes(self.options.layout_device))

    def _count(self, taken: MatrixT, num_parameters: int) -> MatrixT:
        """Count the bytes of what was taken, and the parameters of the whole that it is of."""
        self.num_parameters += num_parameters
        self.num_bytes += taken.nbytes
        return taken

    def take_router(self, name: str, num_experts: int) -> Tensor:
        """Load a router's weight [E, H] in the type it is stored in: rounding sends near ties to other experts."""
        stored = DTYPES.get(self.reader.stored(name).dtype, self.options.dtype)  # ``take`` refuses other types
        dtype = moe.router_dtype(self.options.layout_device, stored, self.options.dtype)
        return self.take(name, num_experts, self.config.hidden_size, dtype=dtype)

    def keep_instead(self, kept: Tensor, *taken: Matrix) -> Tensor:
        """Count the bytes of ``kept`` in place of those of tensors that were taken; gives ``kept``."""
        self.replace_bytes(kept.nbytes, *taken)
        return kept

    def linear(
        self,
        weight: Matrix | Sequence[Matrix],
        bias: Tensor | None = None,
        gates: Sequence[Matrix] = (),
        is_summed: bool = False,
    ) -> Linear:
        """Make a layer of matrices [out, in] that were taken, of the same inputs, one below the other.

        If a matrix itself is still needed, call ``keep`` first. ``gates`` lie behind the others: few outputs that
        decide much, which int4 and fp8 do not round. ``is_summed``: the inputs are a part of this rank, and the
        results of all ranks are added up.
        """
        parts = (weight,) if isinstance(weight, Matrix) else tuple(weight)
        sums = is_summed and self.share.size > 1
        own_bias = None if sums else bias
        made = Linear(parts, own_bias, self.form, self.options.dtype, self.options.layout_device, gates)
        made = SummedLinear(made, bias, self.ranks) if sums else made
        self.replace_bytes(made.nbytes, *parts, *gates, bias)
        return made

    def head(self, matrix: Matrix, num_tokens: int) -> Linear:
        """Make the layer of an output head: this rank's part of a matrix [V, H]; in 8 bits where others have fewer."""
        made = Linear((matrix,), None, head_form(self.form), self.options.dtype, self.options.layout_device)
        if self.share.size > 1:
            made = GatheredLinear(made, self.share.widths(_tokens(num_tokens)), self.ranks)
        self.replace_bytes(made.nbytes, matrix)
        return made

    def take_head(self, name: str, num_tokens: int, width: int) -> Matrix:
        """Load this rank's part of an output head [V, H]. Errors as ``take``."""
        return self.take_matrix(name, num_tokens, width, outputs=[_tokens(num_tokens)])

    def as_head(self, embedding: Matrix) -> Matrix:
        """This rank's part of an embedding [V, H] that stays in memory and is an output head too."""
        if self.share.size == 1:
            self.keep(embedding)
            return embedding
        own = self.share.cut(embedding, [_tokens(embedding.shape[0])])
        self.num_bytes += own.nbytes
        return own

    def keep(self, matrix: Matrix) -> None:
        """Count a matrix that stays in memory beside the layer that ``linear`` makes of it, as an embedding does."""
        if linear.copies(self.options.layout_device, self.options.dtype, self.form):
            self.num_bytes += matrix.nbytes

    def embedding_layer(self, matrix: Matrix, head: Linear | None) -> Embedding:
        """Make the layer of an embedding that was taken; ``head``: an output head that was made of the same matrix."""
        if not isinstance(matrix, QuantizedMatrix):
            return Embedding(matrix.shape, matrix)
        if head is not None:
            assert isinstance(head.product, PackedCodes)
            return Embedding(matrix.shape, None, head.product)
        codes = linear.packed_codes(matrix, self.options.dtype, self.options.layout_device)
        self.replace_bytes(codes.nbytes, matrix)
        return Embedding(matrix.shape, None, codes)

    def share_linear(self, matrix: Matrix, target: HybridTarget) -> Linear:
        """The output layer of a draft head: the target's, or a copy in the draft's form of ``matrix``, its part."""
        if head_form(self.form) == head_form(self.options.form) or isinstance(matrix, QuantizedMatrix):
            return target.head
        if matrix is target.embedding.table:
            self.keep(matrix)
        else:
            self.num_bytes += matrix.nbytes
        return self.head(matrix, target.vocab_size)

    def take_linear(
        self,
        name: str,
        out: int,
        width: int,
        has_bias: bool = False,
        scale: float = 1.0,
        outputs: Sequence[Segment] = (),
        inputs: Sequence[Segment] = (),
    ) -> Linear:
        """Make a layer of ``name``.weight [out, width] and perhaps ``name``.bias [out], both times ``scale``.

        A rank has its part of the ``outputs``, or of the ``inputs``, and then the results of all ranks are added up;
        with neither it has all of the layer.
        """
        bias = self.take(f"{name}.bias", out) if has_bias else None
        weight = self.take_matrix(f"{name}.weight", out, width, outputs=outputs, inputs=inputs)
        if outputs and bias is not None:
            bias = self.part(bias, *outputs)
        return self.linear(scaled(weight, scale), None if bias is None else scaled(bias, scale), is_summed=bool(inputs))

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Make a norm of the weight ``name`` [size]; ``offset``: 1 for families that store w - 1."""
        return RMSNorm(self.take(name, size, dtype=torch.float32) + offset, eps)

    def rotary(self, kind: str | None = None) -> Rotary:
        """The rotary embedding of the config's ``rope_parameters``. Raises UnsupportedModelError.

        Texts are then no longer than those for which its frequencies are right.

        Args:
            kind: of layers, where the config has parameters for each kind.
        """
        frequencies = rotary_frequencies(self.config, kind)
        self.max_length = min(self.max_length, frequencies.max_length)
        return Rotary(frequencies.inverse.to(self.options.device), frequencies.scaling)

    def target(
        self,
        embedding: Matrix,
        blocks: Sequence[Block],
        norm: RMSNorm,
        rotary: Rotary | None = None,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        window_rotary: Rotary | None = None,
    ) -> tuple[HybridTarget, Matrix]:
        """Put the target together; its output head is ``lm_head.weight`` or the embedding.

        Args:
            embedding: from ``take_embedding``.
            blocks, norm, rotary, embedding_scale, logits_scale, window_rotary: as for ``HybridTarget``.

        Returns:
            The target, and the matrix of its output head [V, H], this rank's part.
        """
        matrix = self.output_head("lm_head.weight", embedding, self.config.tie_word_embeddings)
        head = self.head(matrix, embedding.shape[0])
        shares_codes = matrix is embedding  # a rank has all vectors, and a part of the head
        vectors = self.embedding_layer(embedding, head if shares_codes else None)
        scales = embedding_scale, logits_scale
        return HybridTarget(vectors, blocks, norm, head, rotary, *scales, window_rotary), matrix

    def output_head(self, name: str, embedding: Matrix, is_tied: bool) -> Matrix:
        """This rank's part of the output head [V, H].

        It is the stored one if there is one, even where the config says tied, as transformers does.
        """
        if not is_tied or self.reader.has(name):
            head = self.take_head(name, *embedding.shape)
            if isinstance(head, Tensor) and self.form != "plain":
                self.reader.note_run_form(name, self._rounded(head_form(self.form)))
            if not _is_copy(head, self._own_rows(embedding), guess=is_tied):
                return head
            self.num_parameters -= embedding.numel()  # a second copy of the embedding: one is enough
            self.replace_bytes(0, head)
        if isinstance(embedding, Tensor) and (form := self._rounded(head_form(self.form))):
            self.reader.note_run_form(self._embedding_name, f"it is, and as output head in {form}")
        if isinstance(embedding, QuantizedMatrix) and self.share.size == 1:
            return embedding  # one product of codes is both
        return self.as_head(embedding)

    def _own_rows(self, embedding: Matrix) -> Matrix:
        """The vectors of the tokens of this rank's part of the output head; of codes, which are not compared, all."""
        if self.share.size == 1 or isinstance(embedding, QuantizedMatrix):
            return embedding
        own = self.share.units(_tokens(len(embedding)))
        return embedding[own.start : own.stop]

    def replace_bytes(self, num_bytes: int, *taken: Matrix | None) -> None:
        """Count ``num_bytes`` in place of the bytes of tensors that were taken."""
        self.num_bytes += num_bytes - sum(tensor.nbytes for tensor in taken if tensor is not None)


@overload
def scaled(x: Tensor, scale: float | Tensor) -> Tensor: ...
@overload
def scaled(x: Matrix, scale: float | Tensor) -> Matrix: ...
def scaled(x: Matrix, scale: float | Tensor) -> Matrix:
    """Multiply x by a number or a tensor [N, 1] in float32; a tensor's product is rounded to its dtype once."""
    if isinstance(scale, float) and scale == 1.0:
        return x
    return x.scaled(scale) if isinstance(x, QuantizedMatrix) else (x.float() * scale).to(x.dtype)


def reordered(x: Matrix, rows: Tensor) -> Matrix:
    """Put row ``rows[i]`` of a matrix [N, K] at place i."""
    rows = rows.to(x.device)
    return x.with_rows(rows) if isinstance(x, QuantizedMatrix) else x[rows]


def halves(x: Matrix) -> tuple[Matrix, Matrix]:
    """The first and the second half of the rows of a matrix [2 N, K]."""
    half = x.shape[0] // 2
    if isinstance(x, Tensor):
        return x[:half], x[half:]
    minima = (None, None) if x.minimum is None else x.minimum.split(half)
    first, second = (
        replace(x, codes=codes, scale=scale, minimum=minimum)
        for codes, scale, minimum in zip(x.codes.split(half), x.scale.split(half), minima, strict=True)
    )
    return first, second


def head_form(form: WeightForm) -> WeightForm:
    """The form of an output head, whose outputs are compared: 8 bits at the least, and inputs that are not rounded."""
    return "int8" if form.startswith("int4") else "fp8" if form == "fp8-dynamic" else form


def _tokens(num_tokens: int) -> Segment:
    """The rows of an output head."""
    return Segment("tokens in its vocabulary", num_tokens, 1, "uneven")


def _is_copy(head: Matrix, embedding: Matrix, guess: bool) -> bool:
    """Whether a stored output head is the embedding; ``guess``: for matrices without values."""
    if isinstance(head, QuantizedMatrix) or isinstance(embedding, QuantizedMatrix):
        return False
    return have_same_values(head, embedding, guess)


def _require_elements(name: str, shape: Sequence[int]) -> None:
    if min(shape) < 1:
        raise CheckpointError(f"config.json: its sizes give {name} the shape {list(shape)}, without elements")


def loaded_model(
    target: HybridTarget,
    weights: Weights,
    num_state_layers: int,
    state: StateShape,
    *,
    kv: tuple[KVShape, ...] = (),
    attention_width: int = 0,
    head: MTPHead | None = None,
    draft_weights: Weights | None = None,
    context_length: int | None = None,
    rates: Tensor | None = None,
) -> LoadedModel:
    """What the engine gets of a model whose tensors have all been taken. The registry adds its name and end tokens.

    Args:
        target: the model.
        weights: of the target.
        num_state_layers, state: its recurrent layers, and the shape of the state of each.
        kv: of its attention layers, those of the draft head included; of all ranks, as ``state`` is.
        attention_width: query heads times their size, summed over the target's attention layers.
        head: the checkpoint's own draft head.
        draft_weights: of that head.
        context_length: None: the config's ``max_position_embeddings``, or less where its rotary embedding says so.
        rates: A of Mamba1 layers, as in ``CacheShape``.
    """
    config, counted = weights.config, [weights] if draft_weights is None else [weights, draft_weights]
    return LoadedModel(
        architecture="",
        target=target,
        draft_head=head,
        cache_shape=CacheShape(
            kv=tuple(own_kv(shape, weights.share) for shape in kv),
            num_state_layers=num_state_layers,
            state=own_state(state, weights.share),
            dtype=weights.options.dtype,
            draft_features=head.num_modules * head.width if head else 0,
            rates=rates,
        ),
        context_length=weights.max_length if context_length is None else context_length,
        num_parameters=sum(each.num_parameters for each in counted),
        weight_bytes=sum(each.num_bytes for each in counted),
        num_layers=config.num_hidden_layers,
        attention_width=attention_width,
    )
