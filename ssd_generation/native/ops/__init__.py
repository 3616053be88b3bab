"""Operations of a pass: the code of their kernels, and what calls them."""
