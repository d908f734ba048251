"""Errors that a person reads: each is one line that names the argument, its value and the limit."""

from __future__ import annotations


class XStageError(ValueError):
    """Bad input or file. `exit_code` is what the command line returns for it."""

    exit_code = 2


class UnsuitableMachine(XStageError):
    """This machine cannot do what was asked: too few GPUs, no peer access, a missing package."""

    exit_code = 3


class CalibrationFailed(XStageError):
    """A calibration ran and its measurements failed a quality gate, or a rank was lost on the way."""

    exit_code = 4


class PeerTimeout(XStageError):
    """A bounded wait on a peer gave up. The message names rank, phase and tag."""

    exit_code = 3
