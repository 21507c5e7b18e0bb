"""LoRA on augmented weights: A is appended to W, and kernels add h @ B."""
