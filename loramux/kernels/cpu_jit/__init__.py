"""Operations in loops that numba compiles, for a CPU. Only here may numba be imported."""
