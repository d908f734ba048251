"""Fixtures that several test files share, and what must be set before CuTe DSL or torch is imported."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matrices as small as tests have only lose by threads, by far on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
