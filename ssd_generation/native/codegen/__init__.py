"""LLVM's language: what modules are put together from, teams of threads, compilation."""
