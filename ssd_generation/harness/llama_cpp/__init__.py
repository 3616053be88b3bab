"""llama.cpp as a peer of this library's methods, in processes of its own."""

from .gguf import describe_gguf, gguf_methods
from .peer import CONTEXT, LlamaCpp, llama_cpp_version

__all__ = ["CONTEXT", "LlamaCpp", "describe_gguf", "gguf_methods", "llama_cpp_version"]
