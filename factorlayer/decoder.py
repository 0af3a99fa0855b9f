"""GRUDecoder: a decoder's step at inference, from the last tokens to the next ones, by as few kernels as it takes."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from factorlayer.autograd import decode_ops
from factorlayer.autograd.layer_ops import decode_at_once, transforms_active
from factorlayer.autograd.runtime import CompileError
from factorlayer.functional import Implementation, implementation_name
from factorlayer.layers import FactorLinear
from factorlayer.maths.decoder import LAYERS_MOST, Decoder, Made, why_not
from factorlayer.maths.recurrence import is_dense
from factorlayer.recurrences.cell import Cell, cells_of
from factorlayer.recurrences.gated import no_autocast
from factorlayer.recurrent import FactorGRU, FactorGRUCell

Choice = str | tuple[Any, ...]
GRU = FactorGRU | FactorGRUCell | nn.GRU | nn.GRUCell
UNITS = FactorGRU, FactorGRUCell, nn.GRU, nn.GRUCell
LOOKED_AT = "embedding", "gru", "head", "choose"
SEEDS = 1 << 62
Key = tuple[int, torch.dtype, torch.device]  # the bits of the number of samples, and what the state is like


class GRUDecoder(nn.Module):
    """A step is embedding[tokens], the context behind it, a step of the unit, the head, and a choice among its scores.

    Args:
        embedding: nn.Embedding, of the tokens; the head's weight may be its own.
        gru: FactorGRU, FactorGRUCell, nn.GRU or nn.GRUCell, in one direction. What its inputs have beside the
            embedding's features is the context.
        head: nn.Linear or FactorLinear, to a score for each token.
        choose: "argmax"; ("best", k); ("sample", temperature), or ("sample", temperature, k) among the k best alone.
        seed: of what is drawn; drawn itself by PyTorch's generator if it is not given.
        implementation: "auto"; "fused": one op or an error; "naive" and "batched": the modules' own calls.

    The modules stay who they are, and their parameters are read at every step: what an optimizer or load_state_dict
    changes counts from the next step on. There are no gradients; the dtype is the parameters' own, under autocast too.
    """

    random: Tensor

    def __init__(
        self,
        embedding: nn.Embedding,
        gru: GRU,
        head: nn.Linear | FactorLinear,
        choose: Choice = "argmax",
        *,
        seed: int | None = None,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__()
        self._check_modules(embedding, gru, head)
        self.embedding, self.gru, self.head = embedding, gru, head
        self.choose, (self._kind, self.temperature, self.k) = choose, _read(choose)
        self.hidden_size, self.layers = gru.hidden_size, getattr(gru, "num_layers", 1)
        self.vocabulary = head.out_features
        self.context_size = gru.input_size - embedding.embedding_dim
        self._known: dict[Key, str | None]
        self._at_once: dict[int, str]  # the op's text, by numbers of samples with which it has run
        self.implementation = implementation
        if self.k > self.vocabulary:
            raise ValueError(f"GRUDecoder: k should be {self.vocabulary} at most, as the head has it; it is {self.k}")
        if seed is None:
            seed = int(torch.randint(SEEDS, (), device="cpu")) if self._kind == "sample" else 0
        with torch.inference_mode(False):
            numbers = torch.tensor([_seed(seed), 0, 0], device=embedding.weight.device)
        self.register_buffer("random", numbers, persistent=False)
        self._cells = _cells(gru)
        self._names = [name for cell in self._cells for name in cell.shapes if not name.startswith("initial")]
        self._is_cell = isinstance(gru, (FactorGRUCell, nn.GRUCell))
        self._draws = self._kind == "sample" and not self.k  # by the op itself
        self._drops = bool(getattr(gru, "dropout", 0))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LOOKED_AT and (name in self.__dict__ or name in self.__dict__.get("_modules", {})):
            raise AttributeError(f"GRUDecoder: {name} is looked at when the decoder is built; build another one")
        super().__setattr__(name, value)

    @property
    def implementation(self) -> Implementation:
        return self._implementation

    @implementation.setter
    def implementation(self, name: Implementation) -> None:
        self._implementation = implementation_name(name, "GRUDecoder")
        self._known, self._at_once = {}, {}

    @staticmethod
    def _check_modules(embedding: Any, gru: Any, head: Any) -> None:
        for name, module, kinds in (
            ("embedding", embedding, (nn.Embedding,)),
            ("gru", gru, UNITS),
            ("head", head, (nn.Linear, FactorLinear)),
        ):
            if not isinstance(module, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"GRUDecoder: {name} should be {names}, it is {type(module).__name__}")
        if embedding.max_norm is not None:
            raise ValueError("GRUDecoder: an embedding with max_norm changes as it is read; take one without")
        if getattr(gru, "bidirectional", False) or getattr(gru, "proj_size", 0):
            raise ValueError("GRUDecoder: gru should go in one direction, from the first step to the last one")
        if gru.input_size < embedding.embedding_dim:
            raise ValueError(
                f"GRUDecoder: gru should have as many inputs as the embedding has features, {embedding.embedding_dim}, "
                f"or more, with a context behind them; it has {gru.input_size}"
            )
        if head.in_features != gru.hidden_size:
            raise ValueError(
                f"GRUDecoder: head should have the unit's features as inputs, {gru.hidden_size}, it has "
                f"{head.in_features}"
            )

    def manual_seed(self, seed: int) -> None:
        """Starts the random numbers again from `seed`, also for a CUDA graph that has been captured."""
        with torch.no_grad():
            self.random.copy_(torch.tensor([_seed(seed), 0, 0]))

    def warmup(self, samples: int) -> None:
        """Makes a step with so many samples, so that all it needs is compiled and loaded: before a CUDA graph captures
        one, or a first request. Nothing is drawn by it."""
        weight, before = self.embedding.weight, self.random.clone()
        context = weight.new_zeros(samples, self.context_size) if self.context_size else None
        self.step(torch.zeros(samples, dtype=torch.int64, device=weight.device), None, context)
        self.random.copy_(before)

    def step(self, tokens: Tensor, state: Tensor | None = None, context: Tensor | None = None) -> tuple[Tensor, ...]:
        """(tokens, state) behind `tokens` [batch]; with ("best", k) (tokens [batch, k], scores [batch, k], state).

        state: as the unit has it, [layers, batch, hidden], or [batch, hidden] of a cell; where a sequence begins if it
            is not given.
        context: [batch, features], if the unit has inputs beside the embedding's.
        """
        if not is_compiling():
            made = self._past_everything(tokens, state, context)
            if made is not None:
                return made
        with torch.no_grad():
            try:
                if self._kind == "sample" and self.random.device != tokens.device:
                    self.random = self.random.to(tokens.device)  # its modules may have gone there without it
                made = self._by_op(tokens, state, context)
            except (AttributeError, IndexError, RuntimeError, TypeError):
                self._check(tokens, state, context)  # which says it in the user's words
                raise
            if made is None:
                self._check(tokens, state, context)
                made = self._by_modules(tokens, state, context)
        return made

    forward = step

    def generate(
        self,
        tokens: Tensor,
        state: Tensor | None = None,
        steps: int = 1,
        end: int | None = None,
        context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The tokens [batch, steps] that follow `tokens` one by one, and the state behind them. A sample that has
        reached the token `end` only repeats it. When all samples have, a CPU takes no further step; a GPU takes all
        steps, and the host does not wait for it."""
        if self._kind == "best":
            raise ValueError(f"GRUDecoder.generate: choose={self.choose!r} has several tokens for one; call step()")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"GRUDecoder.generate: steps should be an integer that is not negative, it is {steps!r}")
        made, ended = list[Tensor](), None
        with torch.no_grad():
            for _ in range(steps):
                tokens, state = self.step(tokens, state, context)
                if end is not None:
                    if ended is not None:
                        tokens = tokens.masked_fill(ended, end)
                    ended = tokens == end
                made.append(tokens)
                if ended is not None and ended.is_cpu and bool(ended.all()):
                    break
            made += [torch.full_like(tokens, end or 0)] * (steps - len(made))
            state = self._begin(tokens) if state is None else state
            return torch.stack(made, dim=1) if made else tokens.new_empty(tokens.shape[0], 0), state

    # By one op

    def why_not_fused(self, state: Tensor) -> str | None:
        """Why there is no op for a step from a state [layers, batch, hidden], or None."""
        if type(self.embedding) is not nn.Embedding or type(self.gru) not in UNITS or type(self.head) is not nn.Linear:
            return "its modules should be nn.Embedding, a unit and nn.Linear themselves"
        if self.layers > LAYERS_MOST:
            return f"it takes {LAYERS_MOST} layers at most"
        for cell in self._cells:
            if cell.norm is not None:
                return "its kernels have no layer norm"
            reason = why_not(cell.recurrence) if is_dense(cell.inputs) else "its input matrices should be dense"
            if reason is not None:
                return reason
        chain = self._cells[0].recurrence.chain
        return decode_ops.why_not_fused(self._text(_bits(state.shape[1])), chain, state)

    def _text(self, bits: int) -> str:
        made: Made = "scores" if self.k else "drawn" if self._kind == "sample" else "best"
        sizes = self.embedding.embedding_dim, self.context_size, self.vocabulary, self.layers
        return Decoder(self._cells[0].recurrence, *sizes, 1 << bits, made, self.head.bias is not None).text

    def _text_for(self, state: Tensor) -> str | None:
        """The op's text, or None where the modules' own calls have to do it."""
        if not is_compiling() and torch._C._is_tracing():
            self._refuse_fused("torch.jit.trace takes numbers of samples for tensors, which its op is not given")
            return None
        key = _bits(state.shape[1]), state.dtype, state.device
        if key not in self._known:
            reason = self.why_not_fused(state)
            if reason is not None:
                self._refuse_fused(reason)
            self._known[key] = self._text(key[0]) if reason is None else None
        return self._known[key]

    def _refuse_fused(self, reason: str) -> None:
        if self.implementation == "fused":
            raise RuntimeError(f"GRUDecoder: implementation='fused' cannot run: {reason}; or use implementation='auto'")

    def _tensors(self) -> tuple[Tensor, ...] | None:
        """The parameters in the op's order, or None where something stands between them and their modules' calls."""
        modules: dict[str, Any] = self._modules
        embedding, unit, head = modules["embedding"], modules["gru"], modules["head"]
        if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or type(unit) not in UNITS:
            return None  # one has taken the place of another
        for module in (embedding, unit, head):
            if module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__:
                return None
        try:  # of the dicts: an attribute of a module takes ten times as long as an entry of a dict
            found = [embedding._parameters["weight"], head._parameters["weight"]]
            if (bias := head._parameters["bias"]) is not None:
                found.append(bias)
            parameters = unit._parameters
            return tuple(found + [parameters[name] for name in self._names])
        except KeyError:  # a parametrization has taken the place of a parameter
            return None

    def _past_everything(self, tokens: Tensor, state: Any, context: Any) -> tuple[Tensor, ...] | None:
        """A step by one C++ call that earlier steps have prepared, or None if it was not prepared or does not apply to
        this call."""
        try:
            text = self._at_once[len(tokens)]
            alike = state.dim() == (2 if self._is_cell else 3)
        except (AttributeError, KeyError, TypeError):
            return None
        tensors = self._tensors()
        if tensors is None or not alike:
            return None
        random = self._buffers["random"] if self._draws else None
        made = decode_at_once(text, tokens, state, context, random, tensors, self.temperature)
        if made is None:
            return None
        return (*self._chosen(made[0]), made[1]) if self.k else tuple(made)

    def _by_op(self, tokens: Tensor, state: Tensor | None, context: Tensor | None) -> tuple[Tensor, ...] | None:
        if self.implementation in ("naive", "batched") or transforms_active() or (self._drops and self.gru.training):
            return None
        tensors = self._tensors()
        given = self._begin(tokens) if state is None else state
        given = given.unsqueeze(0) if self._is_cell else given
        text = self._text_for(given)
        if text is None or tensors is None:
            return None
        tokens = tokens.long() if tokens.dtype is torch.int32 else tokens
        random = self._buffers["random"] if self._draws else None
        try:
            made, behind = decode_ops.decode(text, tokens, given, context, tensors, random, self.temperature)
        except CompileError as error:
            if self.implementation == "fused":
                raise
            self._known, self._at_once = dict.fromkeys(self._known), {}
            warnings.warn(f"GRUDecoder runs its modules' own calls: {error}", RuntimeWarning, stacklevel=3)
            return None
        behind = behind[0] if self._is_cell else behind
        if not (self._drops or is_compiling()):
            self._at_once[tokens.shape[0]] = text
        return (*self._chosen(made), behind) if self.k else (made, behind)

    def _chosen(self, scores: Tensor) -> tuple[Tensor, ...]:
        """The choice made of scores in float32 or float64: tokens, or tokens and scores for ("best", k)."""
        if self._kind == "argmax":
            return (scores.argmax(dim=1),)
        best, places = decode_ops.few(scores, self.k) if self.k else (scores, None)
        if self._kind == "best":
            assert places is not None
            return places, best
        return (decode_ops.draw(best, places, self.random, self.temperature),)

    # By the modules' own calls

    def _by_modules(self, tokens: Tensor, state: Tensor | None, context: Tensor | None) -> tuple[Tensor, ...]:
        with no_autocast(self.embedding.weight):
            x = self.embedding(tokens)
            x = x if context is None else torch.cat([x, context], dim=1)
            if self._is_cell:
                behind = top = self.gru(x, state)
            else:
                axis = 1 if self.gru.batch_first else 0
                made, behind = self.gru(x.unsqueeze(axis), state)
                top = made.squeeze(axis)
            scores = self.head(top)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return *self._chosen(scores), behind

    def _begin(self, tokens: Tensor) -> Tensor:
        """The state that sequences begin with if the call gives none."""
        weight, batch = next(self.gru.parameters()), tokens.shape[0]
        state = weight.new_zeros(self.layers, batch, self.hidden_size)
        for i, cell in enumerate(self._cells):
            if cell.learned_initial:
                state[i] = getattr(self.gru, f"initial{cell.suffix}")
        return state[0] if self._is_cell else state

    # What is wrong with a call

    def _check(self, tokens: Any, state: Any, context: Any) -> None:
        weight = self.embedding.weight
        if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"GRUDecoder: tokens should be integers [batch], int64 or int32; {_what_came(tokens)}")
        batch, sizes = tokens.shape[0], (self.layers, tokens.shape[0], self.hidden_size)
        if self._is_cell:
            sizes = sizes[1:]  # type: ignore[assignment]
        if (context is None) != (self.context_size == 0):
            raise ValueError(
                f"GRUDecoder: the unit has {self.context_size} inputs beside the embedding's features, "
                + ("and a context was given" if context is not None else "and no context [batch, features] was given")
            )
        for name, given, shape in (("state", state, sizes), ("context", context, (batch, self.context_size))):
            if given is None:
                continue
            if not isinstance(given, Tensor) or tuple(given.shape) != shape:
                raise ValueError(f"GRUDecoder: {name} should have the shape {shape}; {_what_came(given)}")
        tensors = {"tokens": tokens, "state": state, "context": context, **dict(self.named_parameters())}
        for name, given in tensors.items():
            if given is not None and given.device != weight.device:
                raise TypeError(
                    f"GRUDecoder: embedding and {name} should be on one device, embedding is on {weight.device} and "
                    f"{name} on {given.device}"
                )
            if given is not None and name != "tokens" and given.dtype != weight.dtype:
                raise TypeError(
                    f"GRUDecoder: embedding and {name} should have one dtype, embedding is {weight.dtype} and "
                    f"{name} is {given.dtype}; convert one with .to()"
                )
        if tokens.is_cpu and batch and not is_compiling():
            least, most = int(tokens.min()), int(tokens.max())
            if least < 0 or most >= self.embedding.num_embeddings:
                raise IndexError(
                    f"GRUDecoder: tokens should be from 0 to {self.embedding.num_embeddings - 1}, as the embedding has "
                    f"them; there is {least if least < 0 else most}"
                )

    def extra_repr(self) -> str:
        return f"choose={self.choose!r}"


def _seed(seed: Any) -> int:
    """As torch.manual_seed takes it; what int64 holds of its bits."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"GRUDecoder: seed should be an integer, it is {seed!r}") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"GRUDecoder: seed should be an integer of 64 bits, it is {number}")
    return number - (1 << 64) if number >= 1 << 63 else number


def _bits(samples: int) -> int:
    """The exponent of the power of two that a number of samples rounds up to."""
    return max(0, samples - 1).bit_length()


def _what_came(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} of the shape {tuple(given.shape)} came"
    return f"something of the type {type(given).__name__} came"


def _cells(gru: GRU) -> tuple[Cell, ...]:
    if isinstance(gru, (FactorGRU, FactorGRUCell)):
        return gru.cells
    sizes = gru.input_size, gru.hidden_size, gru.bias, "dense", None, None, None, None, 1
    layers = gru.num_layers if isinstance(gru, nn.GRU) else None
    return tuple(cells_of("GRUDecoder", *sizes, "after", "tanh", None, False, layers)[0])  # type: ignore[arg-type]


def _read(choose: Any) -> tuple[str, float, int]:
    """What `choose` says: "argmax", "best" or "sample", a temperature, and k, or 0 for all."""
    kind, *numbers = choose if isinstance(choose, tuple) and choose else (choose,)
    right = {"argmax": (0, 0), "best": (1, 1), "sample": (1, 2)}.get(kind if isinstance(kind, str) else "")
    fine = right is not None and right[0] <= len(numbers) <= right[1]
    ks = numbers[1:] if kind == "sample" else numbers
    fine = fine and all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in ks)
    temperature = numbers[0] if fine and kind == "sample" else 1.0
    fine = fine and isinstance(temperature, (int, float)) and 0 < temperature < math.inf
    if not fine:
        raise ValueError(
            'GRUDecoder: choose should be "argmax", ("best", k), ("sample", temperature) or ("sample", temperature, k) '
            f"with temperature and k above 0, it is {choose!r}"
        )
    return kind, float(temperature), ks[0] if ks else 0
