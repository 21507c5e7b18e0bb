"""Small-M GEMM of the base weights: MMA fragment layout, split-K, launch parameters."""
