"""Code made for this processor, by LLVM: what torch has no fast kernel for."""
