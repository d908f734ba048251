"""Fixtures that several test files share, and what must be set before CuTe DSL or torch is imported."""

from __future__ import annotations

import os
import tempfile

import pytest
import synthetic

from xstage.platform import Platform, load_platform

# Kernels keep their PTX, so that tests can read it.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ.setdefault("CUTE_DSL_KEEP", "ptx,cubin")
os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp(prefix="xstage-ptx-"))
os.environ.pop("XSTAGE_KERNELS", None)  # an object that was loaded has no PTX
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@pytest.fixture(scope="session")
def paper() -> Platform:
    """The published platform of the paper."""
    return load_platform("paper-8gpu")


@pytest.fixture(scope="session")
def measured() -> Platform:
    """A SYNTHETIC measured platform (see tests/synthetic.py)."""
    return synthetic.platform()
