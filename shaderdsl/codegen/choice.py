"""What a schedule is free to choose, as data: tile shapes, lanes a row, pieces of k.

A schedule states all of it in one call, where it takes its default from a cost model:

    s = pick(target, "row", default, candidates, fits)

``s`` is the default unless the target carries a tuned choice for the schedule of that
name that fits the kernel at hand. A choice never changes what is computed, so whatever
``fits`` lets through must give the right result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from .target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """The numbers of one schedule.

    Args:
        schedule: its name, as it is given to `pick`.
        values: ``(field, number)`` of its configuration, nested ones with dots.
        over: the values of the default that it was measured against, if it was; another
            default may well be faster than both.
    """

    schedule: str
    values: tuple[tuple[str, int], ...]
    over: tuple[tuple[str, int], ...] | None = None

    @classmethod
    def of(cls, schedule: str, config: Any) -> Choice:
        """The numbers of a configuration, a dataclass of ints and of such."""
        return cls(schedule, tuple(_flat(config)))

    def applied(self, config: T) -> T:
        """A configuration like the given one, with these numbers.

        Raises:
            ValueError: its fields are others.
        """
        numbers = dict(self.values)
        if [name for name, _ in _flat(config)] != list(numbers):
            raise ValueError(f"{self} does not suit {config!r}")
        return cast(T, _filled(config, numbers, ""))

    def __str__(self) -> str:
        values = ", ".join(f"{name}={n}" for name, n in self.values)
        return f"{self.schedule}({values})"


class Decider(Protocol):
    """What a target may carry to decide for its schedules."""

    def decide(
        self,
        schedule: str,
        default: T,
        candidates: Callable[[], Iterable[T]],
        fits: Callable[[T], bool],
    ) -> T:
        """The configuration to print."""
        ...


@dataclass(unsafe_hash=True)
class Fixed:
    """Decides as a choice says; ``used`` tells whether it fitted."""

    choice: Choice
    used: bool = field(default=False, compare=False, repr=False)

    def decide(
        self,
        schedule: str,
        default: T,
        candidates: Callable[[], Iterable[T]],
        fits: Callable[[T], bool],
    ) -> T:
        """See `Decider`."""
        if self.choice.schedule != schedule:
            return default
        if self.choice.over not in (None, tuple(_flat(default))):
            return default
        try:
            config = self.choice.applied(default)
        except ValueError:  # Of another version, or written by somebody.
            return default
        if not fits(config):
            return default
        self.used = True
        return config


class Survey:
    """Notes what there is to choose, and decides for the defaults.

    Attributes:
        choices: the default first, then candidates that fit, most promising first.
    """

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def decide(
        self,
        schedule: str,
        default: T,
        candidates: Callable[[], Iterable[T]],
        fits: Callable[[T], bool],
    ) -> T:
        """See `Decider`."""
        for config in (default, *candidates()):
            choice = Choice.of(schedule, config)
            if choice not in self.choices and (config is default or fits(config)):
                self.choices.append(choice)
        return default


def pick(
    target: Target,
    schedule: str,
    default: T,
    candidates: Callable[[], Iterable[T]],
    fits: Callable[[T], bool],
) -> T:
    """The configuration of a schedule: a frozen dataclass of ints and of such.

    Args:
        default: what the cost model says.
        candidates: what is worth a measurement, most promising first.
        fits: whether a configuration gives the right result for this kernel on this
            target, and stays within its limits.
    """
    if target.choice is None:
        return default
    return target.choice.decide(schedule, default, candidates, fits)


def _flat(config: Any, prefix: str = "") -> Iterable[tuple[str, int]]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, int(value)


def _filled(config: Any, numbers: dict[str, int], prefix: str) -> Any:
    new = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            new[f.name] = _filled(value, numbers, f"{prefix}{f.name}.")
        else:
            new[f.name] = type(value)(numbers[prefix + f.name])
    return dataclasses.replace(config, **new)


class Tuned(dict[str, Choice]):
    """Choices by kernel (see `tuning_key`); ``note`` says why there are none."""

    def __init__(self, choices: Mapping[str, Choice] | None = None, note: str = ""):
        super().__init__(choices or {})
        self.note = note
