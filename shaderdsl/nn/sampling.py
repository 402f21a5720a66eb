"""Drawing a token from logits, on the device and without sorting.

Thresholds of top-k and top-p are found on the bits of the logits: as unsigned integers
that are ordered like the numbers, the threshold is built from the highest bits down,
and each step asks by sums over the row how much lies above a candidate. Noise comes
from a counter-based generator, so that a draw is a function of seed and position.

The noise is Gumbel's trick, argmax(log p + g) has distribution p, written as
argmax(p / e) with exponential e. Source: Maddison et al., "A* sampling" (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import namespace as sd
from ..array import Array, asarray
from ..errors import ShaderError
from ..function import compile
from ..ir import expr as E
from ..ir.trace import Value
from ..op import op
from ..random import threefry
from ..runtime import current

__all__ = ["Sampler", "keys", "options"]


#: bits of a threshold that one pass finds, by 2^bits sums over the row
_BITS = 4


def options(
    vocab_size: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> np.ndarray:
    """The options as the device reads them, f32; what is off gets its neutral value.

    Raises:
        ShaderError: one of them is out of range.
    """

    def check(name: str, value: float | None, fine: bool, range: str) -> None:
        if value is not None and not fine:
            raise ShaderError(
                f"{name} is {value}; it must be {range}",
                where=E.user_location(),
                cure=f"choose {name} in that range, or leave it out",
            )

    inside = np.isfinite(temperature) and temperature >= 0
    check("temperature", temperature, bool(inside), "0 or a positive number")
    check("top_k", top_k, top_k is None or top_k >= 1, "at least 1")
    check("top_p", top_p, top_p is None or 0 < top_p <= 1, "in (0, 1]")
    check("min_p", min_p, min_p is None or 0 <= min_p <= 1, "in [0, 1]")
    penalty = 1.0 if repetition_penalty is None else repetition_penalty
    check("repetition_penalty", penalty, 0 < penalty < float("inf"), "positive")
    k = vocab_size if top_k is None else min(top_k, vocab_size)
    p = 1.0 if top_p is None else top_p
    return np.array([temperature, k, p, min_p or 0.0, penalty], np.float32)


def keys(seed: int | Any, batch: int) -> np.ndarray:
    """Keys u32 ``[batch, 2]``; row r of an int seed has the key of seed + r · 2³²."""
    seeds = [seed + (r << 32) for r in range(batch)] if isinstance(seed, int) else seed
    if len(seeds) != batch:
        raise ShaderError(
            f"{len(seeds)} seeds for {batch} sequences", where=E.user_location()
        )
    words = [(int(s) & 0xFFFFFFFF, int(s) >> 32 & 0xFFFFFFFF) for s in seeds]
    return np.array(words, np.uint32)


def _penalised(logits: Any, seen: Any, last: Any, choice: Any) -> tuple[Any, Any]:
    """Logits with the penalty, and what has been seen with the last token."""
    known = sd.where(sd.index("v") == last, 1, seen)
    penalty = choice.at(o=4)
    smaller = sd.where(logits < 0.0, logits * penalty, logits / penalty)
    return sd.where(known != 0, smaller, logits), known


def _token(scores: Any, broken: Any) -> Any:
    """The first of the greatest, or -1 where the logits are not numbers."""
    return sd.where(sd.isnan(broken), -1, sd.argmax(scores, over="v"))


@op("b v -> b")
def likeliest(logits: Any) -> Any:
    """The token of the greatest logit, the first of equals; -1 where one is NaN."""
    return _token(logits, sd.max(logits, over="v"))


_ROW = "b v, b v, b, o"


@op(_ROW + " -> b, b v")
def draw_greedy(logits: Any, seen: Any, last: Any, choice: Any) -> tuple[Any, Any]:
    """The likeliest token after the penalty, the first of equals; and the new ``seen``.

    Args:
        logits: f32 [b, v].
        seen: i32 [b, v], not 0 for tokens that the penalty is for.
        last: i32 [b], tokens that became seen since; none where negative.
        choice: f32 [5], see :func:`options`.
    """
    x, known = _penalised(logits, seen, last, choice)
    return _token(x, sd.max(x, over="v")), known


@op(_ROW + " -> b v, b v, b v")
def weigh(logits: Any, seen: Any, last: Any, choice: Any) -> tuple[Any, Any, Any]:
    """exp((x - max x) / temperature) of logits x after the penalty; keys; ``seen``.

    The keys are u32 that are ordered like the logits. Both zeros are one.
    """
    x, known = _penalised(logits, seen, last, choice)
    bits = sd.bitcast(sd.where(x == 0.0, 0.0, x), "u32")
    negative = (bits >> 31) == 1
    key = sd.where(negative, ~bits, bits | _u32(1 << 31))
    return sd.exp((x - sd.max(x, over="v")) / choice.at(o=0)), key, known


@op("b v, b v, b, b -> b", j=1 << _BITS)
def narrow(
    weight: Any, order: Any, wanted: Any, found: Any, *, shift: int, count: int
) -> Any:
    """Bits found so far and the next few of a threshold among the keys.

    The threshold is the greatest one from which on the elements weigh ``wanted`` or
    more, or are as many, with ``count`` = 1.
    """
    # A number that is given when it runs: both searches are one kernel.
    weight = sd.where(sd.cast(count, "i32") > 0, 1.0, weight)
    j, shift = sd.index("j"), sd.cast(shift, "u32")
    candidate = found + (sd.cast(j, "u32") << shift)
    mass = sd.sum(sd.where(order >= candidate, weight, 0.0), over="v")
    # Weights are not negative, so the candidates that pass are the first few.
    more = sd.where(mass >= wanted, _u32(1) << shift, _u32(0))
    return sd.sum(sd.where(j == 0, found, more), over="j")


@op("b v, b v, b, o -> b")
def share(weight: Any, order: Any, at_k: Any, choice: Any) -> Any:
    """p times the weight of what top-k left."""
    mass = sd.sum(sd.where(order >= at_k, weight, 0.0), over="v")
    return choice.at(o=2) * mass


def _exponential(key: Any, position: Any) -> Any:
    """-log u from 32 bits of (key, position, v)."""
    trace = key.trace
    v = E.cast(E.index(trace.axis("v")), "u32")
    bits, _ = threefry(
        key.at(z=0).expr, key.at(z=1).expr, v, E.cast(position.expr, "u32")
    )
    u = (sd.cast(Value(bits, trace), "f32") + 0.5) * 2.0**-32
    # It is the small results that are drawn, and f32 is fine-grained near u = 0 only.
    return -sd.log1p(-sd.minimum(u, 1.0 - 2.0**-24))


@op("b v, b v, b, o, b z, b -> b", z=2)
def pick(
    weight: Any,
    order: Any,
    low: Any,
    choice: Any,
    key: Any,
    first: Any,
    *,
    start: int,
) -> Any:
    """A token with the chances of its weight, from ``low`` on and left by min-p.

    Args:
        low: u32 [b].
        key: u32 [b, 2].
        first: i32 [b]; ``start`` less this is which draw of a key it is.
    """
    keep = (order >= low) & (weight >= choice.at(o=3))
    # The first of clocks with such rates rings; Gumbel's trick without logarithms.
    score = sd.where(keep, weight / _exponential(key, start - first), -1.0)
    return _token(score, sd.max(weight, over="v"))


def _u32(n: int) -> Any:
    from ..ir import trace as T

    return Value(E.const(n, "u32"), T.current())


# ------------------------------------------------------------------ as plans

# Pieces, so that any combination of options runs kernels that the first draw compiled.


def _search(weight: Array, order: Array, wanted: Array, zero: Array, count: Any) -> Any:
    found = zero
    for shift in range(32 - _BITS, -1, -_BITS):
        found = narrow(weight, order, wanted, found, shift=shift, count=count)
    return found


def _share(weight: Array, order: Array, at_k: Array, choice: Array) -> Any:
    return share(weight, order, at_k, choice)


def _pick(
    weight: Array,
    order: Array,
    low: Array,
    choice: Array,
    key: Array,
    first: Array,
    start: Array,
) -> Any:
    return pick(weight, order, low, choice, key, first, start=start)


def _likeliest(logits: Array) -> Any:
    return likeliest(logits)


def _greedy(logits: Array, seen: Array, last: Array, choice: Array) -> Any:
    return draw_greedy(logits, seen, last, choice)


def _weigh(logits: Array, seen: Array, last: Array, choice: Array) -> Any:
    return weigh(logits, seen, last, choice)


_likeliest = compile(_likeliest)
_greedy = compile(_greedy, donate=("seen",))
_weigh = compile(_weigh, donate=("seen",))
_search, _share, _pick = compile(_search), compile(_share), compile(_pick)

#: The next position, in a text that other plans share.
advanced = compile(lambda start: start + 1)

_warm: set[tuple[int, int, int]] = set()


class Sampler:
    """Draws one token for each row of logits; all state is on the device.

    First the repetition penalty: logits of seen tokens are divided by it, or
    multiplied where they are negative. Temperature 0 takes the greatest, the first of
    equals. Otherwise top-k leaves the tokens whose logit is at least the k-th
    greatest; of these top-p leaves the likeliest whose probabilities together reach p,
    and min-p those with at least min_p times the greatest probability. Tokens with
    equal logits are kept or dropped together, so that a tie at the border keeps more
    than k, or more than p needs. What is left is drawn from softmax(logits /
    temperature).

    Args:
        prompts: the tokens that are seen before, one sequence a row.
        seed: one for all, or one for each sequence.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        vocab_size: int,
        seed: int | Sequence[int] = 0,
        **given: Any,
    ):
        batch = len(prompts)
        self._options = options(vocab_size, **given)
        temperature, k, p, _, penalty = self._options.tolist()
        self._sampled = temperature > 0
        #: Whether a token depends on its logits alone: see `likeliest`.
        self.plain = not self._sampled and penalty == 1
        self._with_k, self._with_p = k < vocab_size, p < 1
        self._key = asarray(keys(seed, batch))
        seen = np.zeros((batch, vocab_size), np.int32)
        if penalty != 1:
            for row, tokens in zip(seen, prompts, strict=True):
                row[tokens] = 1
        self._seen = asarray(seen)
        self._last = asarray(np.full(batch, -1, np.int32))
        self._zero = asarray(np.zeros(batch, np.uint32))
        self._k = asarray(np.full(batch, k, np.float32))
        self._counts = [asarray(np.int32(i)) for i in (0, 1)]
        self._choice = asarray(self._options)
        self._shape = (batch, vocab_size)

    def __call__(self, logits: Array, start: Array, first: Array) -> Array:
        """Tokens i32 [b] from logits [b, v]; -1 where these are not numbers.

        ``start - first`` (i32 [] and [b]) is the position that noise is drawn for.
        """
        self._warm_up(logits, start, first)
        if self.plain:
            self._last = _likeliest(logits)
        elif self._sampled:
            self._last = self._draw(logits, start, first)
        else:
            self._last = self._take(logits)
        return self._last

    def _take(self, logits: Array) -> Array:
        token: Array
        token, self._seen = _greedy(logits, self._seen, self._last, self._choice)
        return token

    def _draw(
        self, logits: Array, start: Array, first: Array, every: bool = False
    ) -> Array:
        weight, order, self._seen = _weigh(logits, self._seen, self._last, self._choice)
        low = self._zero
        if self._with_k or every:
            low = _search(weight, order, self._k, self._zero, self._counts[1])
        if self._with_p or every:
            wanted = _share(weight, order, low, self._choice)
            low = _search(weight, order, wanted, self._zero, self._counts[0])
        token: Array = _pick(weight, order, low, self._choice, self._key, first, start)
        return token

    def _warm_up(self, logits: Array, start: Array, first: Array) -> None:
        """Compile once what other options would run."""
        where = (id(current()), *self._shape)
        if where not in _warm:
            _warm.add(where)
            _likeliest(logits)
            advanced(start)
            self._take(logits)
            self._choice, kept = asarray(np.ones(5, np.float32)), self._choice
            self._draw(logits, start, first, every=True)
            self._choice = kept
