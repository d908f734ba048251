"""Numbers as printed in the paper (arXiv 2607.23264): tables 2 and 3, and section 5.2.1. Times in µs, as printed."""

from __future__ import annotations

SOURCE = "arXiv 2607.23264"

# Table 2: W8A8, skewed routing, 55,808 tokens, 8 GPUs; medians.
# model: span wave, span interleaved, stall wave predicted, measured, stall interleaved predicted, measured
TABLE2 = {
    "DiT-MoE": (9.93, 3.77, 4.63, 4.18, 0.0, 0.04),
    "Qwen3.5": (9.17, 3.82, 4.94, 4.31, 0.0, 0.04),
    "Hy3": (9.68, 3.59, 3.60, 3.08, 0.0, 0.05),
    "MiMo-V2.5": (9.22, 3.94, 1.45, 0.71, 0.0, 0.05),
    "GLM-5.2": (9.53, 3.63, 1.54, 0.92, 0.0, 0.04),
    "DSv4-Flash": (9.48, 3.83, 1.47, 0.65, 0.0, 0.05),
    "DSv4-Pro": (7.88, 3.55, 0.0, 0.06, 0.0, 0.04),
}
TABLE2_TOKENS = 55_808

# Section 5.2.1, interleaved over expert-wave.
MOE84 = {"geomean": 1.18, "median": 1.17, "max": 1.62, "min": 0.94}

# Table 3: attention alone, serial, fused.
TABLE3_TOKENS = (8192, 16384, 32768, 49152, 65536)
TABLE3 = {
    "FA3": {
        "only": (195.2, 785.5, 3236.7, 7275.6, 13249.4),
        "serial": (295.6, 968.3, 3579.6, 7767.9, 13936.6),
        "fused": (207.0, 795.5, 3241.5, 7285.7, 13218.3),
    },
    "FA4": {
        "only": (85.4, 346.5, 1439.4, 3281.4, 5340.7),
        "serial": (140.9, 462.4, 1660.9, 3661.7, 5813.0),
        "fused": (99.4, 356.6, 1429.2, 3282.1, 5348.9),
    },
}
CLOCK_BAND = 0.02  # figure 11: ±2% of the attention time
QLOOP_GAP_8192 = 80.0
