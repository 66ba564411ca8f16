"""The exception tree. Every message says what was seen, what was expected and what to do.

HeadstartError
├── BadInput        the caller's arguments: prompt, budget, sampling settings, drafter
├── Unsupported     the target or a combination of parts cannot do what was asked
├── UnknownTarget   no directory, hub id, GGUF file or alias by that name
├── TrainingStopped a run was interrupted; its state is saved and it can go on
└── FetchError      a download or a cached file is missing, incomplete or not what it should be
"""

from __future__ import annotations


class HeadstartError(Exception):
    """Base of all errors that headstart raises on purpose; the CLI prints them without a traceback."""


class BadInput(HeadstartError, ValueError):
    """An argument cannot be honoured: empty prompt, zero budget, contradictory sampling, wrong vocabulary."""


class Unsupported(HeadstartError):
    """A target or a combination of parts lacks a capability; the message names it and the nearest valid choice."""


class UnknownTarget(HeadstartError, LookupError):
    """A target name that is neither a directory, a hub id, a GGUF file nor a known alias."""


class FetchError(HeadstartError, OSError):
    """A target could not be fetched, or a cached copy is incomplete or differs from its checksum."""


class TrainingStopped(HeadstartError):
    """Training ended early at the caller's wish, with everything saved."""
