"""Operations in batched torch calls, for a CPU without numba."""
