"""``sd.Array``: an array on a device, or a symbol for one while a function is traced.

Operators build stages. On arrays that exist they run at once; inside ``sd.compile``,
``vjp`` or ``grad`` a chain of them is one graph and fuses like an op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import DTYPES, NUMPY, DType, dtype_name, host_array
from .engine import placeholder, run_graph
from .errors import (
    AxisError,
    DeviceError,
    DonatedError,
    DTypeError,
    IndexRangeError,
    ShaderError,
    ShapeError,
    TraceError,
)
from .ir import arrays as A
from .ir import expr as E
from .ir.expr import Expr
from .ir.operators import expand_power, install
from .ir.primitives import PRIMITIVES
from .ir.stage import Stage, input_stage, kept, whole
from .runtime import current as current_device
from .runtime import open_device
from .runtime.buffers import changes

# Integer arrays remember their host copy, so that ids can be checked before a launch.
_KEEP_HOST = 1 << 24


class Array:
    """An n-dimensional array. ``shape`` is a tuple, ``dtype`` one of f32, f16, i32,
    u32, bool.

    Work is asynchronous: ``numpy()``, ``float()`` and ``sd.synchronize()`` wait.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_donated",
        "_held",
        "_host",
        "_span",
        "_stage",
        "dtype",
        "shape",
        "weak",
    )
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Sequence[int], dtype: str):
        self.shape = tuple(shape)
        self.dtype: DType = DTYPES[dtype]
        self._stage: Stage | None = None
        self._buffer: Any = None
        self._host: np.ndarray | None = None
        self._span: tuple[int, int] | None = None
        self._donated = self._held = False
        # A symbol for a Python number: it takes the dtype of what it meets.
        self.weak = False

    # -------------------------------------------------------------- making

    @staticmethod
    def symbol(stage: Stage) -> Array:
        """A symbol for a stage of the graph that is being traced."""
        a = Array(stage.shape, stage.dtype)
        a._stage = stage
        return a

    @staticmethod
    def of_buffer(buffer: Any, shape: Sequence[int], dtype: str) -> Array:
        """An array that lives on the device."""
        a = Array(shape, dtype)
        a._buffer = buffer
        return a

    @staticmethod
    def of_buffers(
        buffers: Sequence[Any], kinds: Sequence[tuple[tuple[int, ...], DType]]
    ) -> list[Array]:
        """Arrays of these shapes and dtypes that live on the device."""
        # Written out: a training step returns hundreds.
        new, out = Array.__new__, []
        for buffer, (shape, dtype) in zip(buffers, kinds):
            a = new(Array)
            a.shape, a.dtype, a._buffer = shape, dtype, buffer
            a._stage = a._host = a._span = None
            a._donated = a._held = a.weak = False
            out.append(a)
        return out

    @staticmethod
    def of_host(x: np.ndarray, dtype: str) -> Array:
        """An array given by the host; it is uploaded when first used."""
        a = Array(x.shape, dtype)
        a._host = np.array(x, NUMPY[dtype], order="C", copy=True)
        a._host.flags.writeable = False
        return a

    # -------------------------------------------------------------- what it is

    @property
    def symbolic(self) -> bool:
        """Whether this stands for a value that is not computed yet."""
        return self._buffer is None and self._host is None

    @property
    def donated(self) -> bool:
        """Whether a call was given this array's memory, so that it is gone."""
        return self._donated

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes as NumPy would hold them."""
        return self.size * np.dtype(NUMPY[self.dtype.name]).itemsize

    def stage(self) -> Stage:
        """The graph node of this array; an array that exists becomes an input."""
        if self._stage is None:
            self._check_live()
            self._stage = input_stage(
                self.shape, self.dtype.name, "captured", source=self
            )
        return self._stage

    def buffer(self) -> Any:
        """Its memory on the current device."""
        self._check_live()
        device = current_device()
        if self._held and (self._buffer is None or self._buffer.device is not device):
            changes[0] += 1
        if self._buffer is None:
            if self._host is None:
                self._refuse("be given to a computation that runs now")
            assert self._host is not None
            self._buffer = device.upload(self._host, self.dtype.name)
            if self.dtype not in (*E.INTS, "bool") or self.size > _KEEP_HOST:
                self._host = None
        elif self._buffer.device is not device:
            host = self._buffer.device.download(
                self._buffer, self.shape, self.dtype.name
            )
            self._buffer = device.upload(host, self.dtype.name)
        return self._buffer

    def span(self) -> tuple[int, int] | None:
        """Least and greatest of integers that the host knows, else None."""
        host = self._host
        if self._span is None and host is not None and host.size:
            least = np.minimum.reduce(host, axis=None)
            self._span = int(least), int(np.maximum.reduce(host, axis=None))
        return self._span

    def donate(self) -> None:
        """Give the memory away; any later use is an error."""
        if self._held:
            changes[0] += 1
        self._donated = True
        self._buffer = self._host = None

    def hold(self) -> None:
        """Count among `changes` when this is given away or gets other memory."""
        self._held = True

    def restore(self, buffer: Any) -> None:
        """Take the memory back that a failed call did not use."""
        if not buffer.consumed:
            self._buffer, self._donated = buffer, False

    def _check_live(self) -> None:
        if self._donated:
            raise DonatedError(
                f"an array of shape {self.shape} was donated and is gone",
                where=E.user_location(),
                cure="use what the function returned in its place, or do not donate "
                "the argument",
            )

    def _refuse(self, what: str) -> None:
        raise TraceError(
            f"a symbolic array of shape {self.shape} cannot {what}",
            where=E.user_location(),
            cure="its values exist only when the compiled function runs; use sd.where, "
            "or return it"
            + ("" if self.shape else "; close over a number that must be known before"),
        )

    # -------------------------------------------------------------- standard

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """The array API standard's functions for these arrays."""
        from .interop import array_api

        return array_api.namespace(api_version)

    @property
    def device(self) -> Any:
        """The device that holds the data; of data not yet uploaded, the current one."""
        return current_device() if self._buffer is None else self._buffer.device

    def to_device(self, device: Any, /, *, stream: Any = None) -> Array:
        """The array in the memory of another device: a `Device` or its name.

        Work runs on the device chosen by ``use_device``; arrays follow.
        """
        if stream is not None:
            raise DeviceError("to_device: there are no streams")
        target = open_device(device)
        if self._buffer is not None and self._buffer.device is target:
            return self
        return Array.of_buffer(
            target.upload(self.numpy(), self.dtype.name), self.shape, self.dtype.name
        )

    # -------------------------------------------------------------- values

    def numpy(self) -> np.ndarray:
        """The values, as a NumPy array (a copy). Waits for them."""
        self._check_live()
        if self._buffer is None:
            if self._host is None:
                self._refuse("be read")
            assert self._host is not None
            return self._host.copy()
        return self.fetch()()

    def fetch(self) -> Callable[[], np.ndarray]:
        """Begin to read the values; the function that is returned waits for them.

        What is launched in between is not waited for, and may be given this array's
        memory.
        """
        self._check_live()
        if self._buffer is None:
            values = self.numpy()
            return lambda: values
        from .ids import look

        look()
        wait: Callable[[], np.ndarray] = self._buffer.device.fetch(
            self._buffer, self.shape, self.dtype.name
        )
        return wait

    # Copies of the slots would share memory, and nobody would know that they do.

    def __copy__(self) -> Array:
        return self  # as arrays never change

    def __deepcopy__(self, memo: Any) -> Array:
        """The same values in memory of their own, which donating this one leaves."""
        if self.symbolic and not self._donated:
            return self
        new = Array.of_host(self.numpy(), self.dtype.name)
        new.weak = self.weak
        return new

    def __reduce__(self) -> Any:
        return Array.of_host, (self.numpy(), self.dtype.name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        x = self.numpy()
        return x if dtype is None else x.astype(dtype, copy=False)

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.numpy().__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def item(self) -> Any:
        """The one value as a Python number."""
        if self.size != 1:
            raise ShapeError(
                f"an array of shape {self.shape} is no single number",
                where=E.user_location(),
                cure="reduce it, e.g. with sd.all, sd.any or sd.sum, or index it",
            )
        return self.numpy().item()

    def tolist(self) -> Any:
        """Nested lists of Python numbers."""
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.dtype not in E.INTS or self.shape:
            raise TypeError("only an integer array without dimensions is an index")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.symbolic and not self._donated:
            self._refuse("decide an if")
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if self._donated:
            return f"Array(donated, shape={self.shape}, dtype={self.dtype})"
        if self.symbolic:
            return f"Array(symbolic, shape={self.shape}, dtype={self.dtype})"
        return (
            f"Array({np.array2string(self.numpy(), threshold=20)}, dtype={self.dtype})"
        )

    # -------------------------------------------------------------- operations

    def __getitem__(self, key: Any) -> Array:
        items = key if isinstance(key, tuple) else (key,)
        if len(items) == 1 and _is_mask(items[0]):
            return _masked(self, asarray(items[0]))
        arrays: list[Any] = []
        plain: list[Any] = []
        for i in items:
            if isinstance(i, (Array, np.ndarray, list)):
                plain.append(("array", len(arrays)))
                ids = asarray(i, "i32" if isinstance(i, list) and not i else None)
                arrays.append(ids)
            elif isinstance(i, slice):
                plain.append(
                    slice(*(n if n is None else _position(n) for n in _bounds(i)))
                )
            else:
                plain.append(i if i is None or i is Ellipsis else _position(i))
        shown = tuple(plain)
        if arrays:
            return take(self, arrays[0]) if len(items) == 1 else _bad_index()
        return call(lambda x: A.get(x, shown, ()), self)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError(
            "arrays do not change",
            where=E.user_location(),
            cure="make a new one: sd.where(mask, new, x), or sd.update_slice(x, new, "
            "axis=…, start=…), which writes in place where x is not used again",
        )

    def reshape(self, *shape: Any) -> Array:
        """The same elements under another shape."""
        sizes = (
            tuple(shape[0])
            if len(shape) == 1 and isinstance(shape[0], Iterable)
            else shape
        )
        return call(lambda x: A.reshape(x, sizes), self)

    def transpose(self, *order: Any) -> Array:
        """Permuted axes, reversed by default."""
        axes = (
            tuple(order[0])
            if len(order) == 1 and isinstance(order[0], Iterable)
            else order
        )
        return call(lambda x: A.transpose(x, axes or None), self)

    @property
    def T(self) -> Array:
        """Axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        if self.ndim < 2:
            raise AxisError(
                f"mT of an array with {self.ndim} dimensions", where=E.user_location()
            )
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def astype(self, dtype: Any) -> Array:
        """The array in another dtype."""
        name = dtype_name(dtype)
        return call(lambda x: A.cast(x, name), self)

    def store(self) -> Array:
        """The same array, written to memory once wherever it is computed.

        Which elementwise values a kernel stores and which its readers compute again is
        the compiler's choice (``sd.lower(f, …).explain()`` gives it); this overrides
        it, here and in the derivative. Values stay the same. Outside of ``sd.compile``
        and the derivatives every array is stored anyway.
        """
        return self._kept("store")

    def inline(self) -> Array:
        """The same array, computed again by each kernel that reads it and not stored.

        Results, and sums and other reductions, have memory all the same; so has what
        would bind more arrays or take more operations than one kernel can.
        """
        return self._kept("inline")

    def _kept(self, keep: str) -> Array:
        self._check_live()
        return Array.symbol(kept(self.stage(), keep)) if self.symbolic else self

    def _reduce(self, kind: str, axis: Any, keepdims: bool) -> Array:
        from . import namespace

        result: Array = getattr(namespace, kind)(self, axis=axis, keepdims=keepdims)
        return result

    def sum(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Σ over axes."""
        return self._reduce("sum", axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Mean over axes."""
        return self._reduce("mean", axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Greatest element over axes; NaN where there is one."""
        return self._reduce("max", axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Least element over axes; NaN where there is one."""
        return self._reduce("min", axis, keepdims)

    def prod(self, axis: Any = None, keepdims: bool = False) -> Array:
        """∏ over axes."""
        return self._reduce("prod", axis, keepdims)

    def argmax(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Index of the first greatest element."""
        return self._reduce("argmax", axis, keepdims)

    def argmin(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Index of the first least element."""
        return self._reduce("argmin", axis, keepdims)

    def any(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Whether any element is nonzero."""
        return self._reduce("any", axis, keepdims)

    def all(self, axis: Any = None, keepdims: bool = False) -> Array:
        """Whether all elements are nonzero."""
        return self._reduce("all", axis, keepdims)

    def __matmul__(self, other: Any) -> Array:
        return call(A.matmul, self, asarray(other))

    def __rmatmul__(self, other: Any) -> Array:
        return call(A.matmul, asarray(other), self)

    def __neg__(self) -> Array:
        return primitive("neg", self)

    def __pos__(self) -> Array:
        return self

    def __abs__(self) -> Array:
        return primitive("abs", self)

    def __invert__(self) -> Array:
        return primitive("not", self)

    if TYPE_CHECKING:  # installed below, from the table of operators

        def _binary(self, other: Any) -> Array: ...

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _binary
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _binary
        __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _binary
        __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = _binary
        __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _binary

    def __pow__(self, other: Any) -> Array:
        result: Array = expand_power(self, other, primitive)
        return result

    def __rpow__(self, other: Any) -> Array:
        result: Array = expand_power(other, self, primitive)
        return result


def _bounds(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


def _position(i: Any) -> int:
    """An index as a Python integer."""
    if not isinstance(i, (bool, np.bool_)):
        try:
            return operator.index(i)
        except TypeError:
            pass
    raise DTypeError(
        f"an index is an integer, a slice, None, ... or an integer array, not {i!r}",
        where=E.user_location(),
    )


def _is_mask(key: Any) -> bool:
    if isinstance(key, Array):
        return key.dtype == "bool"
    return isinstance(key, np.ndarray) and key.dtype.kind == "b"


def _masked(x: Array, mask: Array) -> Array:
    """``x[mask]``: how many there are depends on the mask, which is read."""
    if mask.shape != x.shape[: mask.ndim]:
        raise ShapeError(
            f"a mask of shape {mask.shape} for an array of shape {x.shape}",
            where=E.user_location(),
            cure="the mask has the shape of the array's first axes",
        )
    if mask.symbolic:
        mask._refuse("be an index: how many it chooses is not known")
    rest = x.shape[mask.ndim :]
    chosen = np.flatnonzero(mask.numpy()).astype(np.int32)
    if not chosen.size or 0 in rest:
        return asarray(np.zeros((chosen.size, *rest), NUMPY[x.dtype.name]))
    return take(x.reshape((mask.size, *rest)), asarray(chosen))


def _bad_index() -> Array:
    raise IndexRangeError(
        "an integer array indexes the first axis alone", where=E.user_location()
    )


def is_operand(x: Any) -> bool:
    """Whether an operator takes this: an array, a list or a number."""
    return (
        isinstance(x, (Array, np.ndarray, np.generic, bool, int, float, list, tuple))
        or hasattr(x, "__array__")
        or hasattr(x, "__dlpack__")
    )


def is_number(x: Any) -> bool:
    """A Python number, which is weak: it takes the dtype of what it meets."""
    return isinstance(x, (bool, int, float)) and not isinstance(x, np.generic)


def asarray(x: Any, dtype: Any = None) -> Array:
    """Anything array-like as an :class:`Array`; an Array stays what it is."""
    if isinstance(x, Array):
        return x if dtype is None or dtype_name(dtype) == x.dtype else x.astype(dtype)
    host, name = host_array(x, dtype)
    return Array.of_host(host, name)


def call(build: Callable[..., Stage], *xs: Any) -> Array:
    """Build a stage of arrays and numbers; run it now unless one of them is symbolic.

    Numbers stay constants in a trace; when run at once they are runtime scalars, so
    another number compiles nothing.
    """
    arrays = [x for x in xs if isinstance(x, Array)]
    if any(x.symbolic and not x._donated for x in arrays):
        return Array.symbol(
            _built(
                build, [x.stage() if isinstance(x, Array) else E.const(x) for x in xs]
            )
        )
    scalars: dict[str, Any] = {}
    operands: list[Stage | Expr] = []
    inputs: list[Stage] = []
    for x in xs:
        if isinstance(x, Array):
            inputs.append(placeholder(len(inputs), x.shape, x.dtype.name))
            operands.append(inputs[-1])
        elif isinstance(x, bool):
            operands.append(E.const(x))
        else:
            name = f"s{len(scalars)}"
            if isinstance(x, int) and not -(2**31) <= x < 2**31:
                raise _too_large(x, "i32")
            scalars[name] = x
            operands.append(E.scalar(name, "i32" if isinstance(x, int) else "f32"))
    out = _built(build, operands)
    (buffer,) = run_graph([out], inputs, [x.buffer() for x in arrays], scalars)
    return Array.of_buffer(buffer, out.shape, out.dtype)


def _built(build: Callable[..., Stage], operands: Sequence[Any]) -> Stage:
    """Build a stage; what goes wrong is told at the user's line."""
    try:
        return build(*operands)
    except ShaderError as error:
        if error.where is not None:
            raise
        raise type(error)(
            error.message, where=E.user_location(), cure=error.cure
        ) from None


def _too_large(x: int, dtype: str) -> DTypeError:
    return DTypeError(
        f"the number {x if abs(x) < 10**40 else 'given'} does not fit {dtype}",
        where=E.user_location(),
        cure="use a float, or a number in range",
    )


def primitive(name: str, *xs: Any) -> Array:
    """A primitive of arrays and numbers, with NumPy's broadcasting."""
    operands = [x if is_number(x) else asarray(x) for x in xs]
    arrays = [x for x in operands if isinstance(x, Array)]
    floats = PRIMITIVES[name].takes == "float" or any(
        x.dtype in E.FLOATS if isinstance(x, Array) else isinstance(x, float)
        for x in operands
    )
    if floats:
        operands = [_as_float(x) if type(x) is int else x for x in operands]
    elif any(x.dtype == "u32" and not x.weak for x in arrays):
        # A weak integer takes the type of what it meets; as a runtime number it has to
        # be told.
        operands = [_as_u32(x) if type(x) is int else x for x in operands]
    weak = [x for x in arrays if x.weak]
    if not weak or len(weak) == len(arrays):
        result = call(lambda *s: A.elementwise(name, *s), *operands)
        result.weak = bool(weak)
        return result
    # Weak arrays have no dimensions: as expressions they leave the storage to others.
    unsigned = not floats and any(x.dtype == "u32" for x in arrays)
    dtypes = [
        ("u32" if unsigned and x.dtype == "i32" else x.dtype.name)
        if isinstance(x, Array) and x.weak
        else None
        for x in operands
    ]
    return call(
        lambda *s: A.elementwise(
            name,
            *(
                x if d is None or isinstance(x, Expr) else E.cast(E.load(x, ()), d)
                for x, d in zip(s, dtypes, strict=True)
            ),
        ),
        *operands,
    )


install(Array, primitive, is_operand)


def _as_float(x: int) -> int | float:
    """An integer beyond i32, among floats, is a float."""
    if -(2**31) <= x < 2**31:
        return x
    try:
        return float(x)
    except OverflowError:
        raise _too_large(x, "f32") from None


def _as_u32(x: int) -> Array:
    if not 0 <= x < 2**32:
        raise _too_large(x, "u32")
    return Array.of_host(np.asarray(x, np.uint32), "u32")


def take(x: Array, ids: Array, axis: int = 0) -> Array:
    """``x[ids]`` along an axis; ids that are known on the host are checked."""
    check_ids(x, ids, axis)
    if ids._host is None and ids.size and x.size and ids.dtype in E.INTS:
        from .ids import check_index

        a = A.normal_axis(axis, x.ndim)
        check_index(ids, x.shape[a], "an array", a, "take")
    return call(lambda a, i: A.take(a, i, axis), x, ids)


def check_ids(x: Array, ids: Array, axis: int) -> None:
    """Refuse ids known on the host that are outside of an axis.

    Raises:
        IndexRangeError: one is below 0 or beyond the axis.
    """
    host = ids._host
    if host is None or not host.size or not x.shape or host.dtype.kind not in "iu":
        return
    a = A.normal_axis(axis, x.ndim)
    low, high = int(host.min()), int(host.max())
    if low < 0 or high >= x.shape[a]:
        raise IndexRangeError(
            f"indices run from {low} to {high}, "
            f"{'the first axis' if a == 0 else f'axis {a}'} has size {x.shape[a]}",
            where=E.user_location(),
        )


def read_whole(x: Array) -> Expr:
    """The load of an array at its own axes."""
    return whole(x.stage())
