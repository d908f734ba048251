"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
import synthetic

from xstage.platform import Platform, load_platform


@pytest.fixture(scope="session")
def paper() -> Platform:
    """The published platform of the paper."""
    return load_platform("paper-8gpu")


@pytest.fixture(scope="session")
def measured() -> Platform:
    """A SYNTHETIC measured platform (see tests/synthetic.py)."""
    return synthetic.platform()
