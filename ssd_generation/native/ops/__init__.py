"""Operations of a pass: the code of their kernels, and their callers."""
