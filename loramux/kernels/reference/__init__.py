"""Operations in plain torch, which define the results of all others."""
