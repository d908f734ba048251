"""A mixture-of-experts layer over several ranks: `op.MegaMoE`, its kernels, and the parts that both are tested by."""
