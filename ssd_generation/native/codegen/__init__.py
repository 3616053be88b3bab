"""LLVM IR: building blocks of modules, teams of threads, compilation."""
