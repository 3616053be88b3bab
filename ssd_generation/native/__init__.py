"""Kernels JIT-compiled for this processor by LLVM, where torch has no fast ones."""
