"""Calibration: the burst kernel, the protocol, the fit with its gates."""

from xstage.calibration.run import calibrate

__all__ = ["calibrate"]
