import os
import tempfile

# Kernels keep their PTX, so that tests can read it; must be set before CuTe DSL is imported.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
os.environ.setdefault("CUTE_DSL_KEEP", "ptx,cubin")
os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp(prefix="xstage-ptx-"))
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
