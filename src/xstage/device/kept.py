"""Compiled kernels on disk: with `XSTAGE_KERNELS=FOLDER` in the environment a kernel is compiled once for all processes, not once for each.

    @kept
    def compiled_reduce(layout, wide): ...        # as `functools.cache`, and with a folder also kept there

A file's name is the function's and a digest of its arguments, of this package's kernel sources and of the compiler's version, so a file
that is found fits; others are left alone. Objects are made for sm_90a whatever GPU there is, or none: `xstage prebuild` fills a folder on
any x86-64 machine with the kernel packages, for servers that are to start without compiling. Who can write the folder can run code in
the processes that read it.

Not covered: attention itself, whose arguments a loaded object has not been shown to take; clearing the folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
FOLDER = "XSTAGE_KERNELS"
_SYMBOL = "kernel"
_modules: list[Any] = []  # loaded code stays as long as the process


def kept(function: Function) -> Function:
    """A function that compiles a kernel from arguments whose `repr` says all of them."""

    @cache
    @wraps(function)
    def found(*args: Any, **options: Any) -> Any:
        folder = os.environ.get(FOLDER)
        if not folder:
            return function(*args, **options)
        path = path_of(Path(folder), function, args, options)
        if path.exists():
            try:
                return load(path)
            except Exception as error:  # whatever is wrong with the file, the kernel can be made anew
                print(f"xstage: {path} cannot be loaded ({error}); compiling", file=sys.stderr)
        kernel = function(*args, **options)
        try:
            write(kernel, path)
        except OSError as error:
            print(f"xstage: {path} cannot be written ({error})", file=sys.stderr)
        return kernel

    return found  # type: ignore[return-value]


def path_of(folder: Path, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Path:
    """Where the kernel of a call lies, or would."""
    said = f"{function.__module__}.{function.__qualname__}{args!r}{sorted(options.items())!r}{_sources()}"
    return folder / f"{function.__name__}-{hashlib.sha256(said.encode()).hexdigest()[:24]}.o"


@cache
def _sources() -> str:
    """Digest of everything that a kernel is compiled from."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256(metadata.version("nvidia-cutlass-dsl").encode())
    single = [package / "tile_order.py", package / "attention" / "heads_sm90.py"]
    for path in sorted([*single, *(package / "device").glob("*.py"), *(package / "moe").glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load(path: Path) -> Any:
    """The kernel that `write` wrote."""
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    _modules.append(module)
    return module[_SYMBOL]


def write(kernel: Any, path: Path) -> None:
    """A compiled kernel's object, beside its place first: a reader never finds half of it. One that was loaded cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.partial.o")
    kernel.export_to_c(str(partial), _SYMBOL)
    partial.replace(path)
