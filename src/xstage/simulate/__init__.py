"""Simulator of fused kernels on one rank: event engine, MegaMoE and attention models, traces."""
