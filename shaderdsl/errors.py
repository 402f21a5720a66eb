"""One hierarchy of errors. Each says what was wrong, where, and how to mend it."""

from __future__ import annotations


class ShaderError(Exception):
    """Base of every error that this library raises.

    Args:
        message: what was wrong, with the argument, the axis and both sizes where there
            are such.
        where: the op and the user's own file and line, e.g. ``"rms_norm
            (model.py:12)"``.
        cure: how to mend it, as an instruction.
    """

    def __init__(
        self, message: str, *, where: str | None = None, cure: str | None = None
    ):
        self.message, self.where, self.cure = message, where, cure
        text = message
        if where:
            text += f"\n  where: {where}"
        if cure:
            text += f"\n  cure: {cure}"
        super().__init__(text)


class SignatureError(ShaderError, ValueError):
    """The text of an op's signature cannot be read."""


class ShapeError(ShaderError, ValueError):
    """Ranks or sizes disagree."""


class AxisError(ShapeError):
    """An axis is named that is not there."""


class DTypeError(ShaderError, TypeError):
    """A dtype that the operation does not take."""


class IndexRangeError(ShaderError, IndexError):
    """An index that leaves its axis: ids out of range, or an unguarded index map."""


class ReductionError(ShaderError, ValueError):
    """A reduction over nothing that has no identity (max, min, argmax, mean of an empty
    axis).
    """


class DifferentiationError(ShaderError, TypeError):
    """A derivative that does not exist: a non-float argument, a non-scalar loss."""


class TraceError(ShaderError, TypeError):
    """A symbolic value used where Python needs a number (``if``, ``float()``,
    ``numpy()``).
    """


class MemberError(TraceError, AttributeError):
    """A symbolic value was asked for what only arrays have: ``x.sum()`` in an op."""


class LimitError(ShaderError, ValueError):
    """More than the device allows: a binding, workgroup memory, workgroups. Says both
    numbers.
    """


class DeviceError(ShaderError, RuntimeError):
    """The device could not do it."""


class NoAdapterError(DeviceError):
    """No adapter was found, or none of the name asked for."""


class DeviceLostError(DeviceError):
    """The device is gone; its arrays with it."""


class OutOfMemoryError(DeviceError, MemoryError):
    """An allocation failed. Says what was asked for and what was live."""


class DonatedError(ShaderError, RuntimeError):
    """An array was used after it had been donated."""


class NotFiniteError(ShaderError, ArithmeticError):
    """``SHADERDSL_DEBUG=nan``: a NaN or an infinity, at the line that made it."""


class CheckpointError(ShaderError, ValueError):
    """A file that is no checkpoint, or one of another model."""


class DataError(ShaderError, ValueError):
    """A file that is not text, or too short to train on."""


class CompilerError(ShaderError, RuntimeError):
    """Our own fault: a check inside the compiler failed, or a driver refused what we
    printed.
    """
