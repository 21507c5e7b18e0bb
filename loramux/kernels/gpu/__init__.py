"""Operations in Triton kernels, for an NVIDIA GPU. Only here may triton be imported."""
